"""Runs torchft's own tests of its process group on one backend and writes what came of each.

    python tests/torchft_suite/suite.py gloo|potluck OUT.json [PATTERN ...]

The tests are the ones that torchft's package contains, unchanged. Those of ``ProcessGroupGloo`` are
chosen; for potluck, ``ProcessGroupPotluck`` stands where torchft would make that class.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "torch_suite"))
from recorder import Recorder

TESTS = {
    "process_group_test": ("*.test_gloo_*", "*.test_functional_*", "NormalGlooMultiPgTest.*"),
    "manager_integ_test": ("*",),
    "local_sgd_integ_test": ("*",),
    "lighthouse_test": ("*",),
    "parameter_server_test": ("*",),
    "checkpointing.pg_transport_test": ("*gloo*",),
}
"""Modules of the package torchft, and which of their tests make a ``ProcessGroupGloo``."""


def prepare(backend: str) -> None:
    """From now on torchft's modules find the group of ``backend`` where they look for Gloo's."""
    import torchft
    from torchft import process_group

    torch.set_num_threads(1)
    if backend == "potluck":
        from potluck.torch import ProcessGroupPotluck

        torchft.ProcessGroupGloo = ProcessGroupPotluck
        process_group.ProcessGroupGloo = ProcessGroupPotluck


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from cases(each)
        else:
            yield each


def run(backend: str, patterns: list[str]) -> dict[str, dict[str, Any]]:
    """The outcome of every test in TESTS whose name matches one of ``patterns``."""
    prepare(backend)
    recorder = Recorder()
    for name, chosen in TESTS.items():
        module = importlib.import_module(f"torchft.{name}")
        wanted = [
            case
            for case in cases(unittest.defaultTestLoader.loadTestsFromModule(module))
            if any(fnmatch.fnmatch(case.id(), f"torchft.{name}.{each}") for each in chosen)
            and any(fnmatch.fnmatch(case.id(), f"*{each}") for each in patterns)
        ]
        unittest.TestSuite(wanted).run(recorder)
        if torch.distributed.is_initialized():  # some leave theirs behind
            torch.distributed.destroy_process_group()
    return {
        re.sub(r"_\d+(?=_|$)", "", name.removeprefix("torchft."), count=1)
        if "NormalGloo" in name
        else name.removeprefix("torchft."): each
        for name, each in recorder.outcomes.items()
    }


if __name__ == "__main__":
    outcomes = run(sys.argv[1], sys.argv[3:] or ["*"])
    Path(sys.argv[2]).write_text(json.dumps(outcomes, indent=1, sort_keys=True))
