"""What a run has done, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from potluck.federated.parameters import Parameters


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round: how many clients were there (``num_available``) and were ``asked``, which of them
    ``arrived``, and why the others are ``missing``; its ``seconds`` and its deadline (None: none).

    ``metrics`` are the means over the clients, weighted by numbers of samples; ``evaluation`` is
    what the server's ``evaluate`` returned. ``note`` says why the round did not count, if it did
    not. ``epsilon`` is the privacy loss until here; ``saturation`` the fraction of values that
    secure aggregation cut off, and ``num_heavy`` of how many clients it cut off the number of
    samples. All are None without.
    """

    number: int
    num_available: int
    asked: tuple[str, ...]
    arrived: tuple[str, ...]
    missing: Mapping[str, str]
    seconds: float
    deadline_s: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    epsilon: float | None = None
    saturation: float | None = None
    num_heavy: int | None = None

    def line(self, total: int, called: Callable[[str], str] = str) -> str:
        """The round in one line; ``called(client)`` is what people call a client."""
        came = f"{len(self.arrived)} of {len(self.asked)} clients"
        words = [f"round {self.number} of {total}: {came} in {self.seconds:.1f} s"]
        figures = {**self.metrics, **self.evaluation}
        words += [f"{name} {value:.4g}" for name, value in figures.items()]
        if self.epsilon is not None:
            words.append(f"epsilon {self.epsilon:.3g}")
        if self.saturation:
            words.append(f"{self.saturation:.2%} of the values cut off")
        if self.num_heavy:
            words.append(
                f"{self.num_heavy} clients count with fewer samples than they have (max_samples of "
                "SecureAggregation)"
            )
        for client, why in list(self.missing.items())[:3]:
            words.append(f"without client {called(client)}: {why}")
        if len(self.missing) > 3:
            words.append(f"and without {len(self.missing) - 3} more")
        if self.note:
            words.append(self.note)
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class History:
    """The result of a run: the last global ``parameters``, and a report on each round."""

    parameters: Parameters
    rounds: tuple[RoundReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The reports, ready for JSON, which has no NaN: such figures are None. Without the
        parameters."""
        return {"rounds": [as_plain(each) for each in self.rounds]}


def as_plain(report: RoundReport) -> dict[str, Any]:
    """``report`` as JSON can hold it: figures that are no finite numbers are None."""
    found = asdict(report)
    for kind in ("metrics", "evaluation"):
        found[kind] = {k: v if math.isfinite(v) else None for k, v in found[kind].items()}
    return found
