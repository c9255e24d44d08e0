"""Comparison of what ranks hold, before their arrays are sent as one flat sequence.

A flat sequence of bytes or elements shows only its length: two models whose tensors differ in
order, dtype or shape may be equally long, and their tensors would be mixed. So the ranks first
compare a description of every item. Each sends a hash of its own; only where these differ do they
look for the first item that differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.errors import Desync, GroupError

_MAX_ITEMS = 1 << 20
_MAX_TEXT = 512
_REFUSED = -1


class Named(Protocol):
    """What tells a rank's name for errors: a group."""

    def describe(self, rank: int) -> str: ...


class Peers(Protocol):
    """What is needed of a group: a context, a sub-group, a process group of torch."""

    @property
    def world_size(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def group(self) -> Named: ...

    def all_gather(self, array: Any) -> Any: ...


def hash_of(items: Mapping[str, str]) -> int:
    """A hash of ``items``, their order included, below 2**48: exact in a float64."""
    return int.from_bytes(blake2b(_hashes(_texts(items)).tobytes(), digest_size=6).digest())


def compare(
    peers: Peers,
    what: str,
    items: Mapping[str, str],
    remedy: str,
    *,
    refused: Exception | None = None,
    operation: str = "",
) -> None:
    """Return if ``items`` (descriptions by name, in order) are equal on all ranks. A collective
    call.

    Else all ranks raise a Desync that names the first difference, with ``remedy``, what to do; the
    group goes on. ``refused`` is an error that this rank is about to raise instead of taking part
    in what follows: the others raise a Desync with its text, and this rank the error itself. Cost:
    an all_gather of 24 bytes per rank; where ranks differ two more and a barrier.
    """
    texts = _texts(items)
    hashes = _hashes(texts)
    row = np.zeros(3, np.int64)
    row[0] = len(texts) if refused is None else _REFUSED
    row[1:] = np.frombuffer(blake2b(hashes.tobytes(), digest_size=16).digest(), np.int64)
    rows = np.asarray(peers.all_gather(row)).reshape(-1, 3)
    if refused is None and (rows == rows[0]).all():
        return
    refusing = np.flatnonzero(rows[:, 0] == _REFUSED)
    if len(refusing):
        told = _gather(peers, "" if refused is None else f"{type(refused).__name__}: {refused}")
        rank = int(refusing[0])
        reason = f"{peers.group.describe(rank)} refused {what}: {told[rank]}"
    else:
        index, rank = _first_difference(peers, hashes, int(rows[:, 0].max()))
        told = _gather(peers, texts[index] if index < len(texts) else "")
        told = [text or "nothing more" for text in told]
        reason = (
            f"{what} differs between ranks, first where {peers.group.describe(0)} has {told[0]} "
            f"and {peers.group.describe(rank)} has {told[rank]}; {remedy}"
        )
    with contextlib.suppress(GroupError):
        _gather(peers, "")  # a rank that ended at once would end the group before others know
    if refused is not None:
        raise refused
    raise Desync(reason, rank=rank, epoch=peers.epoch, operation=operation)


def _texts(items: Mapping[str, str]) -> list[str]:
    return [f"{name!r} ({text})" for name, text in items.items()]


def _hashes(texts: list[str]) -> NDArray[np.int64]:
    digests = b"".join(blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, np.int64)


def _first_difference(peers: Peers, hashes: NDArray[np.int64], most: int) -> tuple[int, int]:
    """The index of the first item that is not equal on all ranks, and the first rank with another
    one than rank 0."""
    padded = np.zeros(min(most, _MAX_ITEMS), np.int64)
    mine = hashes[: len(padded)]
    padded[: len(mine)] = mine
    rows = np.asarray(peers.all_gather(padded)).reshape(peers.world_size, -1)
    differs = rows != rows[0]
    index = int(differs.any(axis=0).argmax())
    return index, int(differs[:, index].argmax())


def _gather(peers: Peers, text: str) -> list[str]:
    padded = np.zeros(_MAX_TEXT, np.uint8)
    data = np.frombuffer(text.encode()[:_MAX_TEXT], np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(peers.all_gather(padded)).reshape(-1, _MAX_TEXT)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
