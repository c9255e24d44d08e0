"""Parameters of a model, a list or a dict of NumPy arrays, and ``Update``, the result of a client's
training: checks and conversions. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from potluck._core.printable import MAX_NAME

Array: TypeAlias = NDArray[Any]
Parameters: TypeAlias = list[Array] | dict[str, Array]


class NotFinite(ValueError):
    """Some values are NaN or infinite."""


def checked(parameters: object, what: str) -> Parameters:
    """``parameters`` with its arrays as NumPy arrays; TypeError or ValueError, beginning with
    ``what``, unless it is a list (or tuple) or a dict of real arrays; NotFinite for values."""
    if not isinstance(parameters, dict | list | tuple):
        raise TypeError(
            f"{what} must be a list or a dict of NumPy arrays, not {type(parameters).__name__}"
        )
    for name in parameters if isinstance(parameters, dict) else ():
        if not isinstance(name, str):
            raise TypeError(f"{what}: the names of arrays are str, not {type(name).__name__}")
    found = {key: _array(value, f"{what}[{key!r}]") for key, value in _items(parameters).items()}
    if not found:
        raise ValueError(f"{what} has no arrays")
    return found if isinstance(parameters, dict) else list(found.values())


def _items(parameters: Any) -> dict[Any, Any]:
    """The arrays by name, or by number."""
    return parameters if isinstance(parameters, dict) else dict(enumerate(parameters))


def _array(value: object, place: str) -> Array:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{place} has dtype {array.dtype}; real numbers are needed")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        num_bad = int(array.size - np.isfinite(array).sum())
        raise NotFinite(f"{place} has {num_bad} of {array.size} values that are NaN or infinite")
    return array


def arrays_of(parameters: Parameters) -> list[Array]:
    """The arrays in order."""
    return list(_items(parameters).values())


def like(parameters: Parameters, arrays: Sequence[Array]) -> Parameters:
    """``arrays`` in the structure, and with the dtypes, of ``parameters``. Values for integer
    arrays are rounded."""
    made = [
        np.rint(new).astype(old.dtype) if old.dtype.kind in "iu" else new.astype(old.dtype)
        for old, new in zip(arrays_of(parameters), arrays, strict=True)
    ]
    return dict(zip(parameters, made, strict=True)) if isinstance(parameters, dict) else made


def difference(found: Parameters, expected: Parameters) -> str:
    """How the structure, shapes or dtypes of ``found`` differ from ``expected``; empty if they do
    not. Float arrays may differ in their precision."""
    if isinstance(found, dict) != isinstance(expected, dict):
        kinds = {True: "a dict", False: "a list"}
        return (
            f"{kinds[isinstance(found, dict)]} of arrays, not {kinds[isinstance(expected, dict)]}"
        )
    ours, theirs = _items(found), _items(expected)
    if isinstance(found, dict) and ours.keys() != theirs.keys():
        missing = ", ".join(sorted(theirs.keys() - ours.keys())) or "none"
        more = ", ".join(sorted(ours.keys() - theirs.keys())) or "none"
        return f"other names of arrays: missing {missing}, unknown {more}"
    if len(ours) != len(theirs):
        return f"{len(ours)} arrays, not {len(theirs)}"
    for name, array in ours.items():
        other = theirs[name]
        if array.shape != other.shape:
            return f"array {name!r} has shape {array.shape}, the global one {other.shape}"
        if (array.dtype.kind == "f") != (other.dtype.kind == "f"):
            return f"array {name!r} has dtype {array.dtype}, the global one {other.dtype}"
    return ""


def fitted(parameters: Parameters, expected: Parameters) -> Parameters:
    """``parameters`` with the dtypes of ``expected`` and, of a dict, in its order: means and sums
    go by position. ``difference`` has found none."""
    if isinstance(parameters, dict) and isinstance(expected, dict):
        parameters = {name: parameters[name] for name in expected}
    with np.errstate(over="ignore"):
        return like(expected, arrays_of(parameters))


def num_values(parameters: Parameters) -> int:
    """The number of all values."""
    return sum(each.size for each in arrays_of(parameters))


def flat(parameters: Parameters) -> NDArray[np.float64]:
    """All values in one float64 vector."""
    return np.concatenate([each.ravel().astype(np.float64) for each in arrays_of(parameters)])


def unflat(vector: NDArray[np.float64], parameters: Parameters) -> Parameters:
    """``vector`` in the shapes and dtypes of ``parameters``; the inverse of ``flat``."""
    arrays, at = [], 0
    for each in arrays_of(parameters):
        arrays.append(vector[at : at + each.size].reshape(each.shape))
        at += each.size
    return like(parameters, arrays)


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
