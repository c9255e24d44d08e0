"""torch's own parallelism on the process group ``"potluck"``: as good as one process alone.

The ranks are started once per world size and run all checks of scripts/parallelism, one after the
other. Here each check is one test, with what each rank said of it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.ports import reserved_ports

SCRIPTS = Path(__file__).parent / "scripts" / "parallelism"
SLOWEST_S = 550
# The first test of the file waits for all checks.
pytestmark = pytest.mark.timeout(1200)

Key = tuple[int, str]


def checks() -> Iterator[Key]:
    """All (world size, check), as written above the checks: ``@check(2, 4)``."""
    for path in sorted(SCRIPTS.glob("*_checks.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "check":
                    for size in mark.args:
                        yield ast.literal_eval(size), node.name


# What four ranks wrote is read by two.
ALL = sorted(checks(), key=lambda key: -key[0])
NEEDS = {(2, "a_checkpoint_of_four_ranks_is_loaded_on_two"): (4, "a_checkpoint_is_saved")}


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    forked_workers: None,
) -> dict[Key, str]:
    """What went wrong in each check that was asked for; empty if nothing did."""
    folder = tmp_path_factory.mktemp("parallelism")
    wanted = {item.callspec.params["key"] for item in request.session.items
              if getattr(item, "callspec", None) and "key" in item.callspec.params
              and item.path == Path(__file__)}  # fmt: skip
    wanted |= {NEEDS[key] for key in wanted if key in NEEDS}
    found: dict[Key, str] = {}
    for world_size in (4, 2):
        names = [name for size, name in ALL if size == world_size and (size, name) in wanted]
        while names:
            done = run_checks(world_size, names, folder)
            found |= {(world_size, name): error for name, error in done.items()}
            # Whoever fails ends its group; the rest of the checks get new processes.
            names = names[len(done) :]
    return found


def run_checks(world_size: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    """Start the ranks; the outcome of each check up to the first that failed."""
    with reserved_ports(1) as [port]:
        return run_checks_at(port, world_size, names, folder)


def run_checks_at(port: int, world_size: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    """``run_checks`` with rank 0 at ``port``."""
    shared = {
        "POTLUCK_HOME": str(folder / "home"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    results = [folder / f"{world_size}-{port}-{rank}.jsonl" for rank in range(world_size)]
    errors = [path.with_suffix(".err") for path in results]
    ranks = []
    try:
        for rank in range(world_size):
            with errors[rank].open("w") as stderr:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPTS / "run.py"), results[rank], folder, *names],
                        env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=stderr,
                        stderr=stderr,
                    )
                )
        codes = [rank.wait(SLOWEST_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = [
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in results
    ]
    outcome = {}
    for number, name in enumerate(names):
        lines = []
        for rank, of_rank in enumerate(told):
            if number >= len(of_rank):
                tail = errors[rank].read_text()[-3000:]
                lines.append(f"rank {rank} ended with {codes[rank]} before its end:\n{tail}")
            elif of_rank[number]["error"]:
                lines.append(f"rank {rank}:\n{of_rank[number]['error']}")
        outcome[name] = "\n".join(lines)
        if lines:
            return outcome
    for rank, code in enumerate(codes):
        if code:
            outcome[names[-1]] += f"rank {rank} left with {code}:\n{errors[rank].read_text()}"
    return outcome


@pytest.mark.parametrize("key", ALL, ids=lambda key: f"{key[1]}-{key[0]}")
def test_equals_one_process_alone(key: Key, outcomes: dict[Key, str]) -> None:
    if outcomes[key]:
        pytest.fail(outcomes[key], pytrace=False)
