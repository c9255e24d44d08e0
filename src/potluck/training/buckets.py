"""Gradient bucketing: which parameters are reduced together. Pure.

Backward produces gradients roughly in the reverse order of registration, so buckets are filled in
that order: the first is complete early, and its all-reduce overlaps with the rest of backward
(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """The size of one parameter. Parameters share a bucket only if their ``key`` (device, dtype) is
    equal."""

    numel: int
    element_bytes: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Bucket:
    """The indices of a bucket's parameters, and the offset of each in the flat buffer, in elements.

    After the ``numel`` elements of gradients the buffer has one flag element per parameter, which
    is not zero if a rank has used the parameter.
    """

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int

    @property
    def length(self) -> int:
        """The number of elements of the flat buffer, with flags."""
        return self.numel + len(self.parameters)


def assign(
    slots: Sequence[Slot], *, bucket_bytes: int, first_bucket_bytes: int
) -> tuple[Bucket, ...]:
    """The buckets, in the order in which they are reduced: at most ``bucket_bytes`` or one
    parameter.

    The first bucket is smaller, so that communication begins early. Deterministic, so all ranks get
    the same buckets in the same order.
    """
    done: list[Bucket] = []
    filling: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}

    def close(key: Hashable) -> None:
        parameters = filling.pop(key)
        del sizes[key]
        offsets, numel = [], 0
        for index in parameters:
            offsets.append(numel)
            numel += slots[index].numel
        done.append(Bucket(tuple(parameters), tuple(offsets), numel))

    for index in reversed(range(len(slots))):
        slot = slots[index]
        limit = bucket_bytes if done else first_bucket_bytes
        size = slot.numel * slot.element_bytes
        if slot.key in filling and sizes[slot.key] + size > limit:
            close(slot.key)
        filling.setdefault(slot.key, []).append(index)
        sizes[slot.key] = sizes.get(slot.key, 0) + size
        if sizes[slot.key] >= (bucket_bytes if done else first_bucket_bytes):
            close(slot.key)
    for key in list(filling):
        close(key)
    # In backward a bucket is complete when its parameter that was registered first is complete.
    return tuple(sorted(done, key=lambda bucket: -min(bucket.parameters)))
