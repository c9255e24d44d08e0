"""What a model's tensors are: names, shapes and dtypes; and whether given ones fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck._core.wire.dtypes import dtype_named

Array = NDArray[Any]
Tensors = Mapping[str, Array]
Layout = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor of a model, on all servers."""

_NAMED = 4
"""How many names an error lists."""


def layout_of(tensors: Tensors) -> Layout:
    """The layout of ``tensors``."""
    return {name: (each.shape, each.dtype.name) for name, each in tensors.items()}


def check_layout(given: Layout, layout: Layout, what: str) -> None:
    """ValueError, which says so, unless ``given`` has the names and shapes of ``layout``, and no
    complex numbers where that has real ones."""
    _check_names(given, layout, layout, what)
    _check_shapes(given, layout, what)


def checked(given: Tensors, layout: Layout, here: Iterable[str], what: str) -> dict[str, Array]:
    """``given`` in the dtypes of ``layout``, if it has the tensors that lie ``here``, in their
    shapes, and finite numbers. ValueError, which says so, if not."""
    part = {name: layout[name] for name in here}
    _check_names(given, part, layout, what)
    _check_shapes(layout_of(given), part, what)
    found = {}
    for name, (_, dtype) in part.items():
        with np.errstate(over="ignore"):  # a number that this dtype can't hold is infinite
            found[name] = np.asarray(given[name], dtype_named(dtype))
        if not np.isfinite(found[name]).all():
            raise ValueError(f"{what} has NaN or infinite numbers in {name!r} ({dtype})")
    return found


def plain(layout: Layout) -> dict[str, Any]:
    """``layout`` as a checkpoint holds it."""
    return {name: [list(shape), dtype] for name, (shape, dtype) in layout.items()}


def of_plain(given: Any) -> Layout:
    """The inverse of ``plain``, also of what a caller sent. TypeError for anything else."""
    if not isinstance(given, dict):
        raise TypeError(f"a layout is a dict of shapes and dtypes, not {type(given).__name__}")
    try:
        return {
            str(name): (tuple(int(each) for each in shape), dtype_named(dtype).name)
            for name, (shape, dtype) in given.items()
        }
    except (ValueError, TypeError) as error:
        raise TypeError(f"this is no layout of a model: {error}") from error


def _check_names(
    given: Iterable[str], expected: Iterable[str], all_names: Iterable[str], what: str
) -> None:
    unknown, missing = set(given) - set(expected), set(expected) - set(given)
    if unknown:
        raise ValueError(
            f"{what} has {_names(unknown)}, which the model has not; it has {_names(all_names)}"
        )
    if missing:
        raise ValueError(f"{what} lacks {_names(missing)}")


def _check_shapes(given: Layout, layout: Layout, what: str) -> None:
    for name, (shape, dtype) in layout.items():
        its_shape, its_dtype = given[name]
        if tuple(its_shape) != tuple(shape):
            raise ValueError(
                f"{what} has shape {tuple(its_shape)} in {name!r}, whose shape is {tuple(shape)}"
            )
        if "complex" in its_dtype and "complex" not in dtype:
            raise ValueError(f"{what} is complex in {name!r}, which is {dtype}")


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(map(repr, listed[:_NAMED])) + more
