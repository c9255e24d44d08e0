"""All live attacks on hosts in network namespaces, and a table of what became of each.

    python tests/net/attack.py              # as root on Linux
    python tests/net/attack.py -k laptop    # some of them

Exit code: 1 if an attack got through (its test failed) or none ran.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
ATTACKS = (
    "tests/net/test_strangers.py",
    "tests/net/test_stolen_laptop.py",
    "tests/net/test_attacks.py",
    "tests/net/test_wire.py",
    "tests/net/test_code_packages.py",
    "tests/net/test_rights.py",
    "tests/net/test_orders.py",
    "tests/net/test_store.py",
    "tests/unit/cluster/content/test_store.py",
    "tests/unit/cluster/data_sets/test_scan.py",
    "tests/unit/cluster/data_sets/test_sets.py",
    "tests/net/test_queue.py::test_a_job_of_a_banned_machine_that_waits_in_the_queue_never_begins",
    "tests/net/test_job_lives.py::test_a_log_line_that_is_an_escape_sequence_obeys_no_terminal",
    "tests/unit/cluster/content/test_whole.py",
    "tests/unit/cluster/environments/test_making.py::"
    "test_a_machine_that_gives_another_wheel_is_named_and_the_index_asked",
    "tests/unit/cluster/environments/test_making.py::"
    "test_an_index_that_lies_is_named_and_leaves_nothing",
    "tests/unit/cluster/environments/test_making.py::"
    "test_the_address_that_was_looked_at_is_the_one_that_is_asked",
    "tests/unit/cluster/environments/test_making.py::"
    "test_a_directory_of_a_wheel_without_end_is_not_read",
    "tests/unit/cluster/environments/test_making.py::"
    "test_a_wheel_that_unpacks_to_more_than_fits_is_refused",
    "tests/unit/cluster/environments/test_making.py::"
    "test_a_wheel_that_brings_a_potluck_of_its_own_is_refused",
    "tests/unit/cluster/environments/test_making.py::"
    "test_a_package_is_built_in_the_sandbox_and_stays_here",
    "tests/unit/cluster/environments/test_plan.py",
    "tests/unit/transport/test_man_in_the_middle.py",
    "tests/conformance/test_parsers.py",
)
OUTCOMES = {"passed": "held", "failed": "GOT THROUGH", "skipped": "not run"}


class Outcomes:
    """A plugin of pytest that remembers what became of each test."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before, seconds = self.rows.get(report.nodeid, ("passed", 0.0))
        outcome = report.outcome if before == "passed" else before
        self.rows[report.nodeid] = (outcome, seconds + report.duration)


def main(arguments: list[str]) -> int:
    outcomes, began = Outcomes(), time.monotonic()
    places = [str(ROOT / each) for each in ATTACKS]
    pytest.main(["-q", "--rootdir", str(ROOT), *places, *arguments], plugins=[outcomes])
    table = Table(title=f"live attacks, {time.monotonic() - began:.0f} s", title_justify="left")
    for title in ("attack", "outcome", "seconds"):
        table.add_column(title, justify="right" if title == "seconds" else "left")
    for test, (outcome, seconds) in outcomes.rows.items():
        file, _, name = test.partition("::")
        words = name.removeprefix("test_").replace("_", " ")
        table.add_row(f"{Path(file).stem}: {words}", OUTCOMES[outcome], f"{seconds:.1f}")
    Console(markup=False).print(table)
    found = [outcome for outcome, _ in outcomes.rows.values()]
    return int("failed" in found or "passed" not in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
