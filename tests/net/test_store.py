"""Files on their way between machines, on links of a known rate: how long it takes, what the source
sends, and what a machine that is killed, lies or falls silent costs the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command
from support.copying import wire_time
from support.figures import Figures
from support.hosts import Network
from support.machines import Machine, view_of

pytestmark = pytest.mark.needs_root_netns

SCRIPT = Path(__file__).parent / "scripts" / "storing.py"


class Storing(Command):
    """The script on a machine."""

    def __init__(self, machine: Machine) -> None:
        command = machine.host.command([sys.executable, str(SCRIPT)])
        super().__init__(command, env=machine.environment, orders=True)
        self.host = machine.host
        self.node = machine.node

    def says(self, key: str, *, since: int = 0, timeout_s: float = 120.0) -> Any:
        """What it says of ``key`` next."""
        line = self.wait_for(f'{{"{key}": ', timeout_s, since=since)
        return json.loads(line)[key]

    def answers(self, order: str, key: str) -> Any:
        since = self.mark
        self.order(order)
        return self.says(key, since=since)


@contextmanager
def storing(network: Network, root: Path) -> Iterator[list[Storing]]:
    """The script on all hosts, which see each other."""
    with ExitStack() as stack:
        made = [stack.enter_context(Storing(Machine(host, root))) for host in network]
        for each in made:
            each.says("ready")
        wanted = frozenset(each.node[:8] for each in made)
        for each in made:
            each.wait_for(lambda line: (view := view_of(line)) is not None and view[1] == wanted)
        yield made


def folder_of(root: Path, count: int) -> Path:
    """One large file, and a hundred small ones."""
    folder = root / "data"
    folder.mkdir()
    with (folder / "large").open("wb") as file:
        for at in range(0, count, 1 << 24):
            file.write(os.urandom(min(1 << 24, count - at)))
    for number in range(100):
        (folder / f"small-{number}").write_bytes(os.urandom(1000))
    return folder


def has_all(machine: Storing, folder: Path, home: Path) -> bool:
    stored = {path.stat().st_size: path for path in (home / "content").rglob("objects/*")}
    large = stored[(folder / "large").stat().st_size]
    return large.read_bytes() == (folder / "large").read_bytes()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [256 << 20, 2000 << 20], ids=["256 MiB", "2000 MiB"])
def test_three_machines_have_it_in_hardly_more_than_the_time_of_one_copy(
    figures: Figures, tmp_path: Path, count: int
) -> None:
    """2000 MiB (``--long -k 2000``) take about four minutes, and 10 GB of the disk."""
    folder = folder_of(tmp_path, count)
    with Network(4, rate="200mbit") as network, storing(network, tmp_path) as made:
        source, *receivers = made
        name = source.answers(f"add {folder}", "added")
        bound = wire_time(source.host, receivers[0].host, count)
        since = [each.mark for each in receivers]
        for each in receivers:
            each.order(f"fetch {name}")
        took = [
            each.says("fetched", since=at, timeout_s=60 + 4 * bound)
            for each, at in zip(receivers, since, strict=True)
        ]
        what = f"3 machines fetch {count >> 20} MiB at 200 Mbit/s"
        figures.take(what, "times of one plain copy:", max(took) / bound, asked=1.25, unit="")
        sent = source.answers("sent", "sent") / count
        figures.take(what, "times that the source sends it:", sent, asked=1.2, unit="")


def test_a_machine_that_is_killed_amid_a_fetch_goes_on_and_liars_are_named(tmp_path: Path) -> None:
    """The others go on meanwhile. Then of three that have all the first sends wrong bits and the
    second falls silent: the last machine gets the right bytes from the third."""
    count = 48 << 20
    folder = folder_of(tmp_path, count)
    with Network(4, rate="200mbit") as network, storing(network, tmp_path) as made:
        source, bob, carl, dora = made
        name = source.answers(f"add {folder}", "added")
        since = carl.mark
        bob.order(f"fetch {name}")
        carl.order(f"fetch {name}")
        before = 0
        while before < count // 4:
            before = bob.says("so_far", since=bob.mark)
        bob.process.kill()
        carl.says("fetched", since=since)
        with Storing(Machine(network[1], tmp_path)) as again:
            again.says("ready")
            again.order(f"fetch {name}")
            assert again.says("missing") <= count - before + (1 << 20)
            again.says("fetched")
            assert has_all(again, folder, tmp_path / "bob")

            source.order("lie")
            carl.order("stall")
            since = dora.mark
            dora.order(f"fetch {name}")
            dora.says("fetched", since=since)
            assert has_all(dora, folder, tmp_path / "dora")
            dora.wait_for(
                f"ada ({source.node[:8]}): node {source.node[:12]} sent other", since=since
            )
            assert carl.node[:12] not in "".join(dora.lines[since:]), "silence is no lie"


def test_a_transfer_over_a_narrow_link_costs_no_heartbeat(tmp_path: Path) -> None:
    """At 10 Mbit/s, to two machines at once: nobody is evicted, and no view changes."""
    folder = folder_of(tmp_path, 5 << 20)
    with Network(3) as network, storing(network, tmp_path) as made:
        source, *receivers = made
        name = source.answers(f"add {folder}", "added")
        source.host.shape("10mbit")
        since = {each: each.mark for each in made}
        for each in receivers:
            each.order(f"fetch {name}")
        for each in receivers:
            assert each.says("fetched", since=since[each]) > 3.0
        changes = [
            line for each in made for line in each.lines[since[each] :] if view_of(line) is not None
        ]
        assert changes == []
