"""Machines of a cluster: a host in a namespace, a name, a home, and its agent (``potluck up``).

    with cluster_of(3, tmp_path) as (ada, bob, carl):
        form(ada, bob, carl)               # all three up, and in one view
        since = marks([ada, bob])
        seconds = -carl.kill() + agreed(ada, bob, since=since)
        with bob.run("train.py") as run:   # workers on both
            assert run.finish() == 0

Needs what ``hosts`` needs. An agent is started and ended as often as one likes; a process that
lives as long as its machine starts it, so that a test which ends with other agents than it began
with has left nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from potluck._core.cluster.sharing.offers import SharingStore
from potluck._core.cluster.sharing.rules import Kept
from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck._core.system import SIGCONT, SIGKILL
from potluck._core.transport.credentials import node_id_of
from support.commands import Command, potluck_command
from support.hosts import Host, Network

PSK = "ab" * 32
"""The secret of a ``Machine`` that is given none."""
NAMES = ("ada", "bob", "carl", "dora", "emil", "fay", "gus", "hedy")
"""What people call the machines, in the order of their hosts."""
WAIT_S = 120.0

_VIEW = re.compile(r"epoch (\d+): (.*) \(leader (.*?\b[0-9a-f]{8})\b")
_ID = re.compile(r"\b[0-9a-f]{8}\b")
_STARTER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells do for what runs in the background
while sys.stdin.readline():
    agent = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    print("agent: process", agent.pid, flush=True)
    print("agent: ended", agent.wait(), flush=True)
"""


class Machine:
    """A host with a home of its own under ``root``. ``environment`` is added to the agent's; the
    secret is ``psk``, or what the home holds if that is empty. Scripts of all members run there
    unless ``POTLUCK_RUN_FOR`` or the home says otherwise."""

    def __init__(self, host: Host, root: Path, *, psk: str = PSK, **environment: str) -> None:
        self.host = host
        self.name = NAMES[host.index]
        self.home = root / self.name
        self.environment = {
            "POTLUCK_HOME": str(self.home),
            "POTLUCK_NAME": self.name,
            # Hosts in namespaces share one kernel, and could share memory, which machines can't.
            "POTLUCK_USE_SHARED_MEMORY": "no",
            "POTLUCK_ALLOW_ROOT": "1",  # making hosts takes root
            "PYTHONUNBUFFERED": "1",
            **({"POTLUCK_PSK": psk} if psk else {}),
            **environment,
        }
        store = SharingStore(self.home)
        if store.read() == Kept():  # nobody is asked on these machines
            store.write(Kept("all"))
        self.node = node_id_of(load_or_create_identity(self.home).public_key())
        self.id = self.node[:8]
        self.pid = 0
        self._began = 0
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        starter = [sys.executable, "-c", _STARTER, *potluck_command(), "up"]
        command = Command(self.host.command(starter), env=self.environment, orders=True)
        self.command = self._stack.enter_context(command)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._stack.close()

    # Its agent.

    @property
    def is_up(self) -> bool:
        """Whether an agent was started and did not end."""
        return self.pid != 0

    def start(self) -> None:
        """Start the agent; ``wait_until_up`` returns when it listens."""
        assert not self.is_up, "its agent runs already"
        self._began = self.mark
        self.command.order("up")
        line = self.command.wait_for("agent: process ", WAIT_S, since=self._began)
        self.pid = int(line.rsplit(" ", 1)[1])

    def wait_until_up(self) -> None:
        self.command.wait_for(" is up on port ", WAIT_S, since=self._began)

    def signal(self, number: int) -> float:
        """Send a signal to the agent; when, in seconds of ``time.monotonic``."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def kill(self) -> float:
        """End the agent with SIGKILL, if one runs; when."""
        return self._end(SIGKILL)

    def down(self) -> float:
        """End the agent by SIGTERM, if one runs; when. It was started with SIGINT ignored."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> float:
        if not self.is_up:
            return time.monotonic()
        when = self.signal(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, SIGCONT)
        self.command.wait_for("agent: ended", WAIT_S, since=self._began)
        self.pid = 0
        return when

    def cut(self) -> None:
        """Pull its cable."""
        self.host.link(up=False)

    def heal(self) -> None:
        """Plug its cable in again."""
        self.host.link(up=True)

    # What it says.

    @property
    def mark(self) -> int:
        """``since`` for lines that come later."""
        return self.command.mark

    @property
    def lines(self) -> list[str]:
        """What this run of the agent said so far."""
        return self.command.lines[self._began :]

    @property
    def views(self) -> list[tuple[int, frozenset[str]]]:
        """The views of this run of the agent so far: epoch, and the short ids of the nodes."""
        return self.views_since(self._began)

    def views_since(self, since: int) -> list[tuple[int, frozenset[str]]]:
        """The views that it told of after ``since``."""
        return [view for line in self.command.lines[since:] if (view := view_of(line))]

    @property
    def epoch(self) -> int:
        return self.views[-1][0]

    @property
    def leader(self) -> str:
        """The short id of the leader of its newest view."""
        found = [match for line in self.lines if (match := _VIEW.search(line))]
        return found[-1][3][-8:]

    def sees(self, *others: Machine, since: int | None = None, timeout_s: float = WAIT_S) -> float:
        """Wait for a view of exactly these; when it came. Without ``since`` its present view may
        be that one."""
        wanted = frozenset(each.id for each in others)
        if since is None:
            since = self.mark
            if self.views and self.views[-1][1] == wanted:
                return time.monotonic()
        return self.command.when(
            lambda line: (view := view_of(line)) is not None and view[1] == wanted,
            timeout_s,
            since=since,
        )

    def says(self, text: str, *, since: int, timeout_s: float = WAIT_S) -> float:
        """Wait for a line with ``text``; when it came."""
        return self.command.when(text, timeout_s, since=since)

    def changes_nothing(self, seconds: float, *, since: int) -> None:
        """For this long there is no new view; AssertionError if there is."""
        self.command.lacks(lambda line: view_of(line) is not None, seconds, since=since)

    # Commands on it.

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its commands."""
        return os.environ | self.environment

    def run(self, *arguments: str | os.PathLike[str]) -> Command:
        """``potluck run ARGUMENTS`` on this machine, started."""
        words = [*potluck_command(), "run", *(os.fspath(each) for each in arguments)]
        return Command(self.host.command(words), env=self.environment)

    def status(self) -> dict[str, Any]:
        """``potluck status --json``."""
        done = self.runs("status", "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def shows(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """``status``, once ``is_it`` accepts it: agents tell each other of jobs now and then. Each
        look is a command, which takes processor time from those that are waited for."""
        deadline = time.monotonic() + WAIT_S
        while not is_it(status := self.status()):
            assert time.monotonic() < deadline, f"{self} still shows {status}"
            time.sleep(0.1)
        return status

    def cluster(self) -> dict[str, Any]:
        """The cluster, of ``status``."""
        cluster: dict[str, Any] = self.status()["cluster"]
        return cluster

    def runs(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A command of potluck on this machine, to its end, which reads the text ``stdin``."""
        return subprocess.run(
            self.host.command([*potluck_command(), *arguments]),
            env=self.variables,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    def others(self) -> list[int]:
        """The processes on its host that are neither its agent nor what starts that."""
        return [pid for pid in self.host.pids() if pid not in (self.pid, self.command.process.pid)]

    def left_over(self, timeout_s: float = WAIT_S) -> list[int]:
        """What is left of ``others`` when all have ended, or ``timeout_s`` have passed."""
        deadline = time.monotonic() + timeout_s
        while (pids := self.others()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return pids

    def kept(self, pattern: str, timeout_s: float = WAIT_S) -> list[Path]:
        """What is left of such files of its home when all are gone, or ``timeout_s`` have passed:
        agents clear away what a job had while its starter is told of its end."""
        deadline = time.monotonic() + timeout_s
        while (paths := list(self.home.glob(pattern))) and time.monotonic() < deadline:
            time.sleep(0.01)
        return paths

    def resident_bytes(self) -> int:
        """The memory that the agent holds now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise AssertionError(f"process {self.pid} tells no VmRSS")

    def __repr__(self) -> str:
        return f"<machine {self.name} ({self.id}) at {self.host.address}>"


def view_of(line: str) -> tuple[int, frozenset[str]] | None:
    """Epoch and short ids of the nodes, of a line of an agent that tells a view."""
    match = _VIEW.search(line)
    return None if match is None else (int(match[1]), frozenset(_ID.findall(match[2])))


@contextmanager
def machines(network: Network, root: Path, **environment: str) -> Iterator[list[Machine]]:
    """A machine on each host, none of them up; ``environment`` as for ``Machine``."""
    with ExitStack() as stack:
        yield [stack.enter_context(Machine(host, root, **environment)) for host in network]


@contextmanager
def cluster_of(num_hosts: int, root: Path, **environment: str) -> Iterator[list[Machine]]:
    """``machines`` on a ``Network`` of their own."""
    with Network(num_hosts) as network, machines(network, root, **environment) as made:
        yield made


def leader_of(members: Iterable[Machine]) -> Machine:
    """The one of these that leads, as the first of them sees it."""
    members = list(members)
    return next(each for each in members if each.id == members[0].leader)


def by_seniority(members: Iterable[Machine]) -> list[Machine]:
    """These, the most senior first, as the newest view of the first of them has them."""
    members = list(members)
    views = [match[2] for line in members[0].lines if (match := _VIEW.search(line))]
    order = _ID.findall(views[-1])
    return sorted(members, key=lambda each: order.index(each.id))


def form(*members: Machine) -> float:
    """Have these up and in one view, whatever was before; seconds from the last one that came up
    until all are. Others must be down, or cut off."""
    began = time.monotonic()
    starting = [each for each in members if not each.is_up]
    for each in starting:
        each.start()
    for each in starting:
        each.wait_until_up()
        began = time.monotonic()
    return agreed(*members) - began


def marks(members: Iterable[Machine]) -> dict[Machine, int]:
    """``since`` for each of them."""
    return {each: each.mark for each in members}


def agreed(*members: Machine, since: dict[Machine, int] | None = None) -> float:
    """Wait until all of these use a view of exactly these; when the last one did. With ``since``,
    a view that is newer than that."""
    return max(each.sees(*members, since=since[each] if since else None) for each in members)


def first_to_say(text: str, *members: Machine, since: dict[Machine, int]) -> Machine:
    """Wait for a line with ``text`` of any of these; who said it."""
    deadline = time.monotonic() + WAIT_S
    while True:
        for each in members:
            if any(text in line for line in each.command.lines[since[each] :]):
                return each
        assert time.monotonic() < deadline, f"none of {members} said {text!r}"
        time.sleep(0.01)


def one_history(*members: Machine, after: int) -> dict[int, frozenset[str]]:
    """The views that any of these used with an epoch above ``after``; AssertionError if two used
    different ones in the same epoch."""
    history: dict[int, frozenset[str]] = {}
    for each in members:
        for epoch, nodes in each.views:
            if epoch > after:
                assert history.setdefault(epoch, nodes) == nodes, f"two views in epoch {epoch}"
    return history
