"""Which parameters travel together: the pure part of gradient bucketing.

Backward produces gradients roughly in the reverse order of registration, so buckets are filled in
that order: the first is complete early, and its all-reduce overlaps with the rest of backward
(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """What bucketing needs to know of one parameter. Only equal ``key`` (device, dtype) mix."""

    numel: int
    element_bytes: int
    key: Hashable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some parameters and where each begins in the bucket's flat buffer (in elements).

    Behind the ``numel`` gradient elements come ``len(parameters)`` elements, one per parameter:
    not zero where a rank has used it.
    """

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int

    @property
    def length(self) -> int:
        """Elements of the flat buffer, the flags included."""
        return self.numel + len(self.parameters)


def assign(
    slots: Sequence[Slot], *, bucket_bytes: int, first_bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets of at most ``bucket_bytes`` (or one parameter), in the order they are sent.

    The first one is smaller, so that communication begins early. The order depends only on the
    arguments, so it is the same on every rank.
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
    # A bucket is complete when the parameter that was registered first is.
    return tuple(sorted(done, key=lambda bucket: -min(bucket.parameters)))
