"""Figures that tests measure, next to those that were asked for: one table row for each fault.

A test *takes* a figure: it is printed, kept when ``--figures FILE`` asks for it, and held against
what was asked, with room for a machine that is busy with other tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

BUSY_S = 20.0
"""How much longer than asked a time may be before its test fails: machines that test are busy with
other work. The table says whether the asked time was reached."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured of ``fault``. ``asked`` is the most that it may be, None if nothing was
    asked in numbers; ``test`` is what measures it again. ``page`` is the table it belongs to."""

    page: str
    fault: str
    what: str
    value: float
    unit: str
    asked: float | None
    test: str

    @property
    def is_reached(self) -> bool:
        return self.asked is None or self.value <= self.asked

    @property
    def text(self) -> str:
        """``noticed after 0.02 s``."""
        unit = f" {self.unit}" if self.unit else ""
        number = f"{self.value:.2f}" if self.unit in ("s", "MiB") else f"{self.value:g}"
        return f"{self.what} {number}{unit}"


class Figures:
    """What one test takes. ``file`` gets a line for each figure."""

    def __init__(self, test: str, file: Path | None) -> None:
        self._test = test
        self._file = file

    def take(
        self,
        fault: str,
        what: str,
        value: float,
        *,
        asked: float | None = None,
        unit: str = "s",
        page: str = "reliability",
    ) -> None:
        """Of ``fault``, ``what`` was ``value``. AssertionError if that is more than ``asked``; a
        time, if it is more than ``BUSY_S`` above that."""
        figure = Figure(page, fault, what, value, unit, asked, self._test)
        print(f"{fault}: {figure.text}" + ("" if asked is None else f" (asked: {asked:g})"))
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(figure)) + "\n")
        limit = None if asked is None else asked + (BUSY_S if unit == "s" else 0.0)
        assert limit is None or value <= limit, f"{fault}: {figure.text}, asked {asked:g}"


def read_figures(file: Path) -> list[Figure]:
    """The figures of one run, in the order they were taken."""
    return [Figure(**json.loads(line)) for line in file.read_text().splitlines()]


def markdown(figures: Iterable[Figure]) -> str:
    """A table with one row for each fault."""
    rows: dict[str, list[Figure]] = {}
    for figure in figures:
        rows.setdefault(figure.fault, []).append(figure)
    lines = ["| fault | measured | asked | test |", "|---|---|---|---|"]
    for fault, found in rows.items():
        measured = "; ".join(each.text for each in found)
        asked = "; ".join(_asked(each) for each in found if each.asked is not None) or "-"
        tests = ", ".join(dict.fromkeys(f"`{each.test}`" for each in found))
        missed = "" if all(each.is_reached for each in found) else " **(missed)**"
        lines.append(f"| {fault} | {measured}{missed} | {asked} | {tests} |")
    return "\n".join(lines)


def _asked(figure: Figure) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    return f"<= {figure.asked:g}{unit}"
