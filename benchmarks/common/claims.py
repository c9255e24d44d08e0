"""A claim about speed: what was asked, what was measured, whether that is enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """``what`` is ``CALL: FIGURE``. ``met`` is None where nothing could be measured."""

    what: str
    asked: str
    measured: str
    met: bool | None

    def rows(self) -> list[str]:
        """As rows of a markdown table: one for each figure, ``met`` by figure where it can be."""
        call, _, quantity = self.what.partition(": ")
        figures = _FIGURE.findall(self.measured)
        if ", ".join(f"{name} {value}{unit}" for name, value, unit in figures) != self.measured:
            head = f"| {call} | {quantity} | |"
            return [f"{head} {self.measured} | {self.asked} | {SAID[self.met]} |"]
        rows = []
        for number, (name, value, unit) in enumerate(figures):
            head = f"| {call} | {quantity} |" if number == 0 else "| | |"
            met = SAID[_is_met(self.asked, float(value), self.met)]
            rows.append(f"{head} {name} | {value}{unit} | {self.asked} | {met} |")
        return rows


SAID = {True: "yes", False: "**no**", None: "-"}
_FIGURE = re.compile(r"(?:^|, )([^,]*?[a-zA-Z]) ([\d.e+-]+)(x| MiB| us|%)(?=, |$)")
_LIMIT = re.compile(r"(>=|<=) ([\d.]+)(?:x|%| MiB| us)?$")
HEAD = "| call | figure | of | measured | asked | met |\n|---|---|---|---|---|---|"
QUESTIONS = (
    ("How much of a step is computation on a slow network?", r"200 ms of comp|slow networks"),
    ("How soon is a loss reached on a slow network?", r"the same loss|the end of a training"),
    ("How long does compressing take?", r"compressing"),
    ("Does a training last while machines join and die?", r"joins and deaths"),
    ("How much CPU time and memory does a call take?", r"CPU seconds|memory above"),
    ("How fast is it when the main thread is busy?", r"main thread"),
    ("How fast is a step of PyTorch's DDP?", r"DDP|scaling efficiency"),
    ("Do several workers on a machine send more?", r"hosts of \d workers"),
    ("How fast is it between machines at 1 Gbit/s?", r"hosts at 1 Gbit/s"),
    ("How fast is it between machines at 10 Gbit/s?", r"hosts at 10 Gbit/s"),
    ("How fast is it inside one machine?", r""),
)
"""Headings of docs/dev/performance-asked.md and what a claim below them is about; the first that
fits."""


def question(claim: Claim) -> str:
    """The heading that ``claim`` belongs below."""
    return next(heading for heading, about in QUESTIONS if re.search(about, claim.what))


def markdown(claims: Iterable[Claim]) -> str:
    """A table for each question, in the order of the claims."""
    tables: dict[str, list[str]] = {}
    for claim in claims:
        tables.setdefault(question(claim), [HEAD]).extend(claim.rows())
    return "\n\n".join(f"## {heading}\n\n" + "\n".join(tables[heading]) for heading in tables)


def _is_met(asked: str, value: float, whole: bool | None) -> bool | None:
    limit = _LIMIT.match(asked)
    if limit is None or whole is None:
        return whole
    return value >= float(limit[2]) if limit[1] == ">=" else value <= float(limit[2])


def as_dicts(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Ready for JSON."""
    return [asdict(claim) for claim in claims]


def at_least(
    what: str, asked: str, limit: float, found: Sequence[tuple[str, float]], unit: str = "x"
) -> Claim:
    """All of ``found`` (each with its name) are ``limit`` or more."""
    return _compared(what, asked, found, all(value >= limit for _, value in found), unit)


def at_most(
    what: str, asked: str, limit: float, found: Sequence[tuple[str, float]], unit: str = "x"
) -> Claim:
    """All of ``found`` are ``limit`` or less."""
    return _compared(what, asked, found, all(value <= limit for _, value in found), unit)


def _compared(
    what: str, asked: str, found: Sequence[tuple[str, float]], is_met: bool, unit: str
) -> Claim:
    shown = ", ".join(f"{name} {value:.3g}{unit}".strip() for name, value in found)
    return Claim(what, asked, shown or "not measured", is_met if found else None)
