"""``Update``: what a client's function returns, and the checks of it on both sides."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck._core.printable import MAX_NAME
from potluck.federated.parameters import Parameters, checked, difference, fitted

MAX_SAMPLES = 2**40
"""Of one update: far above any data set, and far below what a sum of float64 holds exactly."""

_MAX_METRICS = 64


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a client's training in one round.

    ``parameters`` has the structure and shapes of the global ones. ``num_samples`` is the weight
    in a weighted mean: the number of samples trained on, from 1 to 2**40. ``metrics`` are numbers
    with names of up to 64 printable characters, of which the server reports the mean, weighted by
    ``num_samples``. ``client`` is set by the server.
    """

    parameters: Parameters
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    client: str = ""


def checked_update(
    found: object, expected: Parameters, client: str = "", max_samples: int = MAX_SAMPLES
) -> Update:
    """``found`` as an update for the global parameters ``expected``.

    TypeError or ValueError, with what is wrong, for another type, no samples or more than
    ``max_samples``, NaN or infinity, or other shapes.
    """
    if not isinstance(found, Update):
        raise TypeError(
            "the client's function must return potluck.federated.Update(parameters, num_samples, "
            f"metrics), not {type(found).__name__}"
        )
    try:
        if isinstance(found.num_samples, bool):
            raise TypeError
        num_samples = operator.index(found.num_samples)
    except TypeError:
        kind = type(found.num_samples).__name__
        raise TypeError(f"num_samples must be a whole number, not a {kind}") from None
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}: a client without samples has no update")
    if num_samples > max_samples:
        raise ValueError(f"num_samples is {num_samples}: more than {max_samples} do not count")
    parameters = checked(found.parameters, "parameters")
    why = difference(parameters, expected)
    if why:
        raise ValueError(f"parameters do not fit the global ones: {why}")
    # A value that the global dtype can't hold is the client's fault, not the aggregate's.
    parameters = checked(fitted(parameters, expected), "parameters")
    metrics: dict[str, float] = {}
    for name, value in dict(found.metrics).items():
        if not 0 < len(str(name)) <= MAX_NAME or not str(name).isprintable():
            raise ValueError(f"the name of a metric has 1 to {MAX_NAME} printable characters")
        if len(metrics) == _MAX_METRICS:
            raise ValueError(f"there are more than {_MAX_METRICS} metrics")
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metrics[{name!r}] must be a number") from None
    return Update(parameters, num_samples, metrics, client)
