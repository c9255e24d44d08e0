"""The reports of a run's rounds, and ``Kept``, which stores them with the parameters on disk, so
that a killed server can resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError
from potluck.federated.aggregation import Aggregation
from potluck.federated.parameters import Parameters, checked, difference, fitted
from potluck.federated.patience import Deadlines
from potluck.federated.privacy import PrivacyLoss
from potluck.federated.secure.settings import Range


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
        """The round in one line; ``called(client)`` is a client's name for people."""
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


@dataclass(eq=False, repr=False)
class Kept:
    """The rounds of one run in the directory ``directory``: parameters, reports, and the state of
    the aggregation, deadlines, limits and privacy loss. An aggregation with a state of its own has
    ``state_dict()`` and ``load_state_dict(state)``, of arrays, numbers and text."""

    directory: Path | str
    aggregation: Aggregation
    deadlines: Deadlines
    limits: Range | None
    loss: PrivacyLoss

    def __post_init__(self) -> None:
        self._store = CheckpointStore(self.directory, keep=2)

    def save(self, parameters: Parameters, reports: Sequence[RoundReport]) -> None:
        """After a round. CheckpointError if it can't be written."""
        state = {
            "aggregation": type(self.aggregation).__name__,
            "parameters": parameters,
            "reports": [as_plain(each) for each in reports],
            "own": getattr(self.aggregation, "state_dict", dict)(),
            "seconds": list(self.deadlines.seconds),
            "limits": None if self.limits is None else self.limits.state_dict(),
            "loss": self.loss.state_dict(),
        }
        self._store.save(state, len(reports))

    def load(self, initial: Parameters) -> tuple[Parameters, list[RoundReport]]:
        """The parameters and reports after the newest round that is kept; ``initial`` and none if
        there is none. CheckpointError if it is of another model or aggregation."""
        found = self._store.load_latest()
        if found is None:
            return initial, []
        try:
            return self._restored(found.state, initial)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.path} is not of this federation ({error}): pass another directory as "
                "checkpoint=, or remove it"
            ) from error

    def _restored(self, state: Any, initial: Parameters) -> tuple[Parameters, list[RoundReport]]:
        name = type(self.aggregation).__name__
        if state["aggregation"] != name:
            raise ValueError(f"its aggregation is {state['aggregation']}, not {name}")
        parameters = checked(state["parameters"], "its parameters")
        why = difference(parameters, initial)
        if why:
            raise ValueError(f"its parameters do not fit the initial ones: {why}")
        reports = [_report(each) for each in state["reports"]]
        if hasattr(self.aggregation, "load_state_dict"):
            self.aggregation.load_state_dict(state["own"])
        self.deadlines.seconds.extend(map(float, state["seconds"]))
        if self.limits is not None and state["limits"] is not None:
            self.limits.load_state_dict(state["limits"])
        self.loss.load_state_dict(state["loss"])
        return fitted(parameters, initial), reports


def _report(plain: dict[str, Any]) -> RoundReport:
    found = dict(plain)
    for kind in ("metrics", "evaluation"):
        found[kind] = {k: math.nan if v is None else v for k, v in found[kind].items()}
    for kind in ("asked", "arrived"):
        found[kind] = tuple(found[kind])
    return RoundReport(**found)
