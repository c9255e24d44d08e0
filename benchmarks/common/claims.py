"""A claim about speed: what was asked, what was measured, whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of docs/performance.md. ``met`` is None where nothing could be measured."""

    what: str
    asked: str
    measured: str
    met: bool | None

    def row(self) -> str:
        """As a row of a markdown table."""
        said = {True: "yes", False: "**no**", None: "-"}[self.met]
        return f"| {self.what} | {self.asked} | {self.measured} | {said} |"


HEAD = "| what | asked | measured | met |\n|---|---|---|---|"


def markdown(claims: Iterable[Claim]) -> str:
    """The table that docs/performance.md holds."""
    return "\n".join([HEAD, *(claim.row() for claim in claims)])


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
