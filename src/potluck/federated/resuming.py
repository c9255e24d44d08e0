"""What a federation keeps on disk after each round, so that a server that was killed goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError
from potluck.federated.history import RoundReport, as_plain
from potluck.federated.parameters import Parameters, checked, difference, fitted
from potluck.federated.patience import Deadlines
from potluck.federated.privacy import PrivacyLoss
from potluck.federated.secure.settings import Range
from potluck.federated.strategies.base import Strategy


class Kept:
    """The rounds of one run in the directory ``directory``: their parameters and reports, and the
    state of what learns from them. A strategy with a state of its own has ``state_dict()`` and
    ``load_state_dict(state)``, of arrays, numbers and text."""

    def __init__(
        self,
        directory: Path | str,
        strategy: Strategy,
        deadlines: Deadlines,
        limits: Range | None,
        loss: PrivacyLoss,
    ) -> None:
        self._store = CheckpointStore(directory, keep=2)
        self._strategy = strategy
        self._deadlines = deadlines
        self._limits = limits
        self._loss = loss

    def save(self, parameters: Parameters, reports: Sequence[RoundReport]) -> None:
        """After a round. CheckpointError if it can't be written."""
        state = {
            "strategy": type(self._strategy).__name__,
            "parameters": parameters,
            "reports": [as_plain(each) for each in reports],
            "own": getattr(self._strategy, "state_dict", dict)(),
            "seconds": self._deadlines.seconds,
            "limits": None if self._limits is None else self._limits.state_dict(),
            "loss": self._loss.state_dict(),
        }
        self._store.save(state, len(reports))

    def load(self, initial: Parameters) -> tuple[Parameters, list[RoundReport]]:
        """The parameters and reports after the newest round that is kept; ``initial`` and none if
        there is none. CheckpointError if it is of another model or strategy."""
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
        name = type(self._strategy).__name__
        if state["strategy"] != name:
            raise ValueError(f"its strategy is {state['strategy']}, not {name}")
        parameters = checked(state["parameters"], "its parameters")
        why = difference(parameters, initial)
        if why:
            raise ValueError(f"its parameters do not fit the initial ones: {why}")
        reports = [_report(each) for each in state["reports"]]
        if hasattr(self._strategy, "load_state_dict"):
            self._strategy.load_state_dict(state["own"])
        self._deadlines.seconds = state["seconds"]
        if self._limits is not None and state["limits"] is not None:
            self._limits.load_state_dict(state["limits"])
        self._loss.load_state_dict(state["loss"])
        return fitted(parameters, initial), reports


def _report(plain: dict[str, Any]) -> RoundReport:
    found = dict(plain)
    for kind in ("metrics", "evaluation"):
        found[kind] = {k: math.nan if v is None else v for k, v in found[kind].items()}
    for kind in ("asked", "arrived"):
        found[kind] = tuple(found[kind])
    return RoundReport(**found)
