"""What a plan is made from: figures measured in the group that is to train. Pure."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of a group of ``len(compute_s)`` ranks. Lists are in rank order.

    Ranks that share a processor, memory or a cable take from each other, for all do the same at the
    same time. So links are measured on all ranks at once, and seconds of work are those of a rank
    that has only its part of the ``processors``.
    """

    compute_s: Annotated[tuple[_Positive, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """Seconds that a rank computes for its share of a step."""
    bytes_per_s: tuple[_Positive, ...]
    """The rate of each rank's links, of the slower direction; empty for one rank."""
    crossing_bytes_per_s: tuple[_Positive, ...]
    """The rate at which each rank sends to, and receives from, all others at once: where several
    streams meet at a rank, packets are lost. Empty for one rank."""
    latency_s: _Seconds
    """One way, the slowest link's."""
    nodes: tuple[str, ...]
    """The machine of each rank."""
    shapes: Annotated[tuple[tuple[int, ...], ...], msgspec.Meta(min_length=1)]
    """Of the gradients, in the order of the model."""
    encode_s: dict[str, _Seconds]
    """By method: seconds to encode one element, of the slowest rank; for PowerSGD up to the sum
    of P."""
    decode_s: dict[str, _Seconds]
    """The same for decoding one payload, or adding it to a sum; for PowerSGD all after the sum of
    P."""
    copy_s: _Seconds
    """Seconds to copy one float32 in memory that is in no cache."""
    hash_s: _Seconds
    """Seconds to hash one float32 of the parameters."""
    processors: _Positive
    """That a rank has to itself, on the machine where it has the fewest; 0.5 if two share one."""

    def __post_init__(self) -> None:
        if len(self.nodes) != self.world_size:
            raise ValueError(f"{self.world_size} ranks on {len(self.nodes)} machines")
        for rates in (self.bytes_per_s, self.crossing_bytes_per_s):
            if self.world_size > 1 and len(rates) != self.world_size:
                raise ValueError(f"{self.world_size} ranks have {len(rates)} rates of links")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise ValueError("a shape has a negative size")

    @property
    def world_size(self) -> int:
        return len(self.compute_s)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def of(self, ranks: tuple[int, ...]) -> Measured:
        """The same samples divided among only these ranks."""
        more = self.world_size / len(ranks)
        return msgspec.structs.replace(
            self,
            compute_s=tuple(self.compute_s[rank] * more for rank in ranks),
            bytes_per_s=tuple(self.bytes_per_s[rank] for rank in ranks if self.bytes_per_s),
            crossing_bytes_per_s=tuple(
                self.crossing_bytes_per_s[rank] for rank in ranks if self.crossing_bytes_per_s
            ),
            nodes=tuple(self.nodes[rank] for rank in ranks),
        )


def encode(measured: Measured) -> str:
    """As JSON."""
    return msgspec.json.encode(measured).decode()


def decode(text: str | bytes) -> Measured:
    """``measured`` of ``encode``; ValueError for anything else."""
    try:
        return msgspec.json.decode(text, type=Measured)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not the measurements of a plan: {error}") from None
