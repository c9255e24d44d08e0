"""A pytest plugin: the outcome of a run as a file, and a run without what passed in another.

``.ci/run`` runs the tests that need no torch where there is none, then all others where it is;
``.ci/once-more`` runs those that failed once more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

IN_BOTH = "beside_torch"
"""The mark of tests whose point is that torch is installed: they pass without it, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="a file that gets the outcome of this run")
    parser.addoption("--except-passed", type=Path, help="leave out what passed in that outcome")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # not a process of pytest-xdist
        config.pluginmanager.register(Outcomes(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--except-passed")
    if path is None:
        return
    if not path.is_file():
        raise pytest.UsageError(f"--except-passed: no file {path}; --outcomes {path} makes it")
    passed = frozenset(json.loads(path.read_text())["passed"])
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        items[:] = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=left_out)


class Outcomes:
    """The tests that passed and failed so far; written at the end of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        path.unlink(missing_ok=True)  # of an earlier run

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # in its setup or teardown, too
            self._failed[report.nodeid] = None
        elif report.passed and report.when == "call" and IN_BOTH not in report.keywords:
            self._passed[report.nodeid] = None

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        has_ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        outcome = {
            "is_whole": has_ended and not session.shouldfail and not session.shouldstop,
            "passed": [name for name in self._passed if name not in self._failed],
            "failed": [*self._failed],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(outcome, indent=0))
