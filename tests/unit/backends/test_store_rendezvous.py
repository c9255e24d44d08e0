"""Ranks that wait for each other say for whom, and name them again when they give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from potluck._core import waiting
from potluck._core.backends import store_rendezvous
from potluck._core.backends.fixed import hosts_of_world
from potluck._core.backends.tcp import TcpBase
from potluck._core.engine.loop.native import is_available
from potluck._core.settings import Settings
from potluck._core.types import Engine, Group
from potluck.errors import OperationTimeout
from support.worlds import run_all

pytest.importorskip("torch")

from torch.distributed import FileStore, HashStore

SETTINGS = Settings(psk="ab" * 32)
WAIT_S = 20.0
SHORT_S = 0.2


@pytest.fixture(params=["file", "hash"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Makes one rank's face of a store that all ranks share."""
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), -1)
    shared = HashStore()
    return lambda: shared


def meet(store: Any, rank: int, world_size: int, timeout_s: float) -> Group:
    return store_rendezvous.meet(
        store, rank, world_size, base=None, local_rank=rank, timeout_s=timeout_s
    )


def test_a_wait_names_the_missing_rank_and_its_machine_and_goes_on_once_it_comes(
    stores: Callable[[], Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", SHORT_S)
    monkeypatch.setattr(waiting, "EVERY_S", SHORT_S)
    monkeypatch.setenv("POTLUCK_NODES", "ada,ada,bob")
    groups: dict[int, Group] = {}

    def come(rank: int) -> None:
        groups[rank] = meet(stores(), rank, 3, WAIT_S)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads[:2]:
        thread.start()
    told = ""
    line = (
        "potluck: rank 0 waits for rank 2 on bob (of 3 ranks) to join the process group; rank "
        "0, 1 joined. Are all ranks started, with the same WORLD_SIZE and init_method? ("
    )
    while line not in told:  # the first may name rank 1, too
        told += capfd.readouterr().err
    threads[2].start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [groups[rank].rank for rank in range(3)] == [0, 1, 2]


def test_the_error_names_all_that_did_not_come(stores: Callable[[], Any]) -> None:
    with pytest.raises(
        OperationTimeout, match=r"rank 0, 2 to 4 \(of 5 ranks\) did not join .* 0\.2 s"
    ) as it:
        meet(stores(), 1, 5, SHORT_S)
    assert it.value.rank == 0


def test_ranks_that_an_agent_started_call_each_other_where_it_reaches_them(
    stores: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that published its own link-local address could be called by no other machine."""
    hosts = ("127.0.0.1", "fe80::1%eth0")
    monkeypatch.setattr(store_rendezvous, "hosts_of_world", lambda rank, world_size: hosts)
    groups: dict[int, Group] = {}

    def come(rank: int) -> None:
        groups[rank] = meet(stores(), rank, 2, WAIT_S)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [member.host for member in groups[0].members] == list(hosts)


def test_each_rank_is_told_of_all_engines_and_sites(stores: Callable[[], Any]) -> None:
    groups: dict[int, Group] = {}

    def come(rank: int) -> None:
        base = TcpBase("127.0.0.1", 0, replace(SETTINGS, site=f"home/rack{rank}"))
        try:
            base.credentials.is_native &= rank == 0
            groups[rank] = store_rendezvous.meet(
                stores(), rank, 2, base=base, local_rank=rank, timeout_s=WAIT_S
            )
        finally:
            base.close()

    run_all([partial(come, rank) for rank in range(2)])
    first = Engine.NATIVE if is_available() else Engine.PYTHON
    for rank in range(2):
        assert [member.engine for member in groups[rank].members] == [first, Engine.PYTHON]
        assert groups[rank].engine is Engine.PYTHON
        assert [member.site for member in groups[rank].members] == ["home/rack0", "home/rack1"]


def test_a_process_that_no_agent_started_knows_no_hosts() -> None:
    assert hosts_of_world(0, 2) == ()
