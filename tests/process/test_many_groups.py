"""One process makes and ends many process groups, as torchft does whenever its quorum changes, or
many sub-groups of one, as long-lived programs do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.quiet_imports import ZYGOTE

SCRIPTS = Path(__file__).parent / "scripts"
STORE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
import sys; sys.stdin.read()
"""
"""A store in a process of its own, since it keeps something of each group."""


kinds_of_links = pytest.mark.parametrize(
    "links",
    [
        {},
        {"POTLUCK_USE_SHARED_MEMORY": "0"},
        pytest.param({"POTLUCK_NATIVE": "0"}, marks=pytest.mark.long),
    ],
    ids=["shared memory", "native links", "python links"],
)


@kinds_of_links
@pytest.mark.parametrize("rounds", [15, pytest.param(50, marks=pytest.mark.long)])
def test_many_groups_one_after_the_other_leave_nothing_behind(
    links: dict[str, str], rounds: int, tmp_path: Path
) -> None:
    run_pair("many_groups.py", str(tmp_path), rounds, links, tmp_path)


@pytest.mark.parametrize(
    ("links", "kinds"),
    [
        ({}, ["yes", "no"]),
        pytest.param({"POTLUCK_NATIVE": "0"}, ["yes"], marks=pytest.mark.long),
    ],
    ids=["shared memory, native links", "python links"],
)
@pytest.mark.parametrize("rounds", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_many_sub_groups_cost_nothing_when_they_are_destroyed(
    links: dict[str, str],
    kinds: list[str],
    rounds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as store:
        assert store.stdout is not None
        port = store.stdout.readline().strip()
        monkeypatch.delenv(ZYGOTE, raising=False)  # they measure their memory: they are executed
        said = run_pair("many_subgroups.py", port, rounds, links, tmp_path, *kinds)
        store.communicate("", timeout=60)
    for text in said:
        assert text.count("nothing is left over") == len(kinds), said


def run_pair(
    script: str, meeting: str, rounds: int, links: dict[str, str], tmp_path: Path, *more: str
) -> list[str]:
    """Run two ranks of ``script``, which meet at ``meeting``; what each said."""
    variables = {"POTLUCK_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), meeting, str(rounds), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables | links,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    print(*said)
    assert all("nothing is left over" in text for text in said), said
    return said
