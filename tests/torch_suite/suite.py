"""Runs torch's own tests for process groups on one backend and writes what came of each.

    python tests/torch_suite/suite.py gloo|potluck OUT.json [PATTERN ...]

The tests are ``DistributedTest`` of ``torch.testing._internal.distributed.distributed_test``, as
torch runs them in ``test_distributed_spawn.py``, with two differences: each rank is forked from a
process that has imported torch (starting three interpreters per test takes ten times longer), and
computes on one thread.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from recorder import Recorder

TEST_TIMEOUT_S = 90


def prepare(backend: str, world_size: int = 4) -> Any:
    """Import torch's tests for ``backend``; the class that runs them."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="torch-suite-")
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(TEST_TIMEOUT_S)
    os.environ["MASTER_ADDR"] = "localhost"
    import torch

    torch.set_num_threads(1)
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_DEFAULT = TEST_TIMEOUT_S
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if backend == "potluck":
        sys.path.insert(0, str(Path(__file__).parent))
        import pose

        pose.pose()
        # torch asks for profiler events with shapes from the backends in these lists only. They
        # hold its own, by name, and the name here is borrowed.
        for listed in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(distributed_test, listed).remove("gloo")

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Suite.__qualname__ = Suite.__name__
    return Suite


def run(backend: str, patterns: list[str]) -> dict[str, dict[str, Any]]:
    """The outcome of every test of the suite whose name matches one of ``patterns``."""
    suite = prepare(backend)
    names = [
        name
        for name in unittest.defaultTestLoader.getTestCaseNames(suite)
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    recorder = Recorder()
    for name in names:
        suite(name).run(recorder)
    return {name.split(".")[-1]: each for name, each in recorder.outcomes.items()}


if __name__ == "__main__":
    outcomes = run(sys.argv[1], sys.argv[3:] or ["test_*"])
    Path(sys.argv[2]).write_text(json.dumps(outcomes, indent=1, sort_keys=True))
