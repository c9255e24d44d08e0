"""The layout of a model: names, shapes and dtypes of its tensors, checks against it, and the
placement of tensors on servers. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

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


def num_bytes(layout: Layout, name: str) -> int:
    """The bytes of the tensor ``name``."""
    shape, dtype = layout[name]
    return math.prod(shape) * dtype_named(dtype).itemsize


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


@lru_cache(maxsize=1 << 16)
def holders(name: str, servers: tuple[str, ...], copies: int = 1) -> tuple[str, ...]:
    """The servers of the tensor ``name``: the ``copies`` servers with the highest hashes of both
    names, the highest first.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
    1998): without a table, and with a server more or less only that server's tensors move.
    """
    if len(servers) == 1:
        return servers
    order = sorted(servers, key=lambda server: (_weight(name, server), server), reverse=True)
    return tuple(order[:copies])


class Placement(NamedTuple):
    """Each tensor lies on ``copies`` of the ``servers``; only those in ``present`` are live."""

    servers: tuple[str, ...]
    copies: int
    present: tuple[str, ...]

    def holders(self, name: str) -> list[str]:
        """The live servers of the tensor ``name``."""
        every = holders(name, self.servers, self.copies)
        return [server for server in every if server in self.present]

    def split(self, tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """``tensors`` by live server, each tensor on all its holders; a server may have none."""
        parts: dict[str, dict[str, Any]] = {server: {} for server in self.present}
        for name, each in tensors.items():
            for server in self.holders(name):
                parts[server][name] = each
        return parts

    def sources(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The server to fetch each tensor from, its first live holder: names by server."""
        parts: dict[str, list[str]] = {}
        for name in names:
            for server in self.holders(name)[:1]:
                parts.setdefault(server, []).append(name)
        return parts


def _weight(name: str, server: str) -> bytes:
    return hashlib.sha3_256(f"{server}\0{name}".encode()).digest()
