"""Runs MLX's own distributed tests on its ring and on potluck, and writes docs/mlx-tests.md.

    make mlx-suite MLX=FOLDER

The folder is a checkout of https://github.com/ml-explore/mlx: the package does not bring its tests.
Those of MPI, which ask for 8 ranks and split their group, run on potluck only. Exits with 1 if a
test fails on potluck for which REASONS has no reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "torch_suite"))
from comparison import Outcomes, explained
from recorder import Recorder

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "mlx-tests.md"
RING, MPI = "ring_test_distributed", "mpi_test_distributed"
REASONS = {
    "test_donation": "it counts MLX's memory: the result of a sum on potluck's links is computed "
    "at once, so the next operation can't write over it, and one array more is held meanwhile",
    "TestRingDistributed.test_groups": "it wants an error: MLX's ring can't split a group, "
    "potluck's can",
}
"""By the end of a test's name, why it is not expected to pass."""


def on_this_rank(module: str, folder: str, out: str) -> None:
    """Run the tests of ``module``; the outcomes of rank 0 go to the file ``out``."""
    if os.environ.get("POTLUCK_JOB"):
        import potluck.mlx

        potluck.mlx.stand_in()
    import mlx.core as mx

    world = mx.distributed.init(strict=True)
    sys.path.append(folder)
    recorder = Recorder()
    unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module)).run(recorder)
    if world.rank() == 0:
        Path(out).write_text(json.dumps(recorder.outcomes))


def outcomes_of(module: str, folder: str, *, on_potluck: bool) -> Outcomes:
    from support.commands import potluck_command
    from support.ports import reserved_ports

    with tempfile.TemporaryDirectory() as place, reserved_ports(2) as ports:
        out, hosts = Path(place) / "outcomes.json", Path(place) / "hosts.json"
        script = [__file__, "--rank", module, folder, str(out)]
        if on_potluck:
            count = "8" if module == MPI else "2"
            starts = [([*potluck_command(), "run", "--workers", count, *script], {})]
        else:
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
            starts = [
                ([sys.executable, *script], {"MLX_RANK": str(k), "MLX_HOSTFILE": str(hosts)})
                for k in range(2)
            ]
        runs = [subprocess.Popen(command, env=os.environ | more) for command, more in starts]
        assert [each.wait(600) for each in runs] == [0] * len(runs)
        result: Outcomes = json.loads(out.read_text())
        return result


def main() -> int:
    checkout = Path(sys.argv[1])
    folder = str(checkout / "python" / "tests")
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    rows, lost = [], []
    for name, module, on_potluck in (
        ("MLX's ring tests, 2 ranks, on its ring", RING, False),
        ("MLX's ring tests, 2 ranks, on potluck", RING, True),
        ("MLX's MPI tests, 8 ranks, on potluck", MPI, True),
    ):
        outcomes = outcomes_of(module, folder, on_potluck=on_potluck)
        counts = Counter(each["outcome"] for each in outcomes.values())
        rows.append(f"| {name} | {counts['pass']} | {counts['fail']} | {counts['skip']} |")
        if on_potluck:
            lost += [test for test, each in outcomes.items() if each["outcome"] == "fail"]
    reasons = {test: why for test in lost for end, why in REASONS.items() if test.endswith(end)}
    lines = [
        "# MLX's own tests on potluck",
        "",
        "Written by `make mlx-suite` (`tests/mlx_suite/run.py`), with a checkout of MLX's "
        "repository. These are MLX's tests of `mx.distributed`, unchanged; for potluck, "
        "[potluck.mlx.stand_in](arrays.md) stands in its place.",
        "",
        f"MLX {importlib.metadata.version('mlx')}, its tests of commit {commit}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}.",
        "",
        *("| | passed | failed | skipped |", "|---|---|---|---|", *rows),
        "",
        "## Failed on potluck",
        "",
        *explained(lost, reasons),
        "",
    ]
    PAGE.write_text("\n".join(lines))
    print("\n".join(lines))
    return int(len(reasons) < len(lost))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_this_rank(*sys.argv[2:])
    else:
        sys.exit(main())
