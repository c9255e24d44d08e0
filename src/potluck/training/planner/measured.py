"""What a plan is made from: figures measured in the group that is to train. Pure."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from potluck._core.wire.format import decoded
from potluck.errors import ProtocolError

VARIABLE = "POTLUCK_PLAN"
"""Set in the environment of workers whose script is only measured."""
FACT = "plan"
"""The fact under which rank 0 reports the measurements."""
SUFFIX = ".plan.json"
"""Of the plan file, beside the script, so that it travels with its folder."""

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a candidate added to the computation of a model of ``elements`` float32, timed on all
    ranks at once. See ``model.Times`` for the seconds."""

    name: str
    bucket_size_mb: _Positive
    elements: Annotated[int, msgspec.Meta(ge=1)]
    own_s: _Seconds
    way_s: _Seconds


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of a group of ``len(compute_s)`` ranks. Lists are in rank order.

    Ranks that share a processor, memory or a cable take from each other, for all do the same at the
    same time. So links and work are measured on all ranks at once.
    """

    compute_s: Annotated[tuple[_Positive, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """Seconds that a rank computes for an equal share of a step."""
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
    shares: Literal["equal", "proportional"] = "equal"
    """Whether all ranks compute as many samples, or as their speed allows."""
    rehearsed: tuple[Rehearsed, ...] = ()

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

    @property
    def step_compute_s(self) -> float:
        """Seconds until the last rank has computed its share of a step."""
        if self.shares == "equal":
            return max(self.compute_s)
        return self.world_size / sum(1 / seconds for seconds in self.compute_s)

    def compute_s_of(self, rank: int) -> float:
        """Seconds that a rank computes for the share that it gets."""
        return self.compute_s[rank] if self.shares == "equal" else self.step_compute_s

    def part(self, elements: int) -> Measured:
        """As if the model had only its last ``elements`` parameters, and computed for as much
        less."""
        share = elements / max(1, self.num_elements)
        return msgspec.structs.replace(
            self,
            compute_s=tuple(seconds * share for seconds in self.compute_s),
            shapes=last(self.shapes, elements),
        )

    def of(self, ranks: tuple[int, ...]) -> Measured:
        """The same samples divided among only these ranks; nothing is rehearsed for them."""
        more = self.world_size / len(ranks)
        return msgspec.structs.replace(
            self,
            compute_s=tuple(self.compute_s[rank] * more for rank in ranks),
            bytes_per_s=tuple(self.bytes_per_s[rank] for rank in ranks if self.bytes_per_s),
            crossing_bytes_per_s=tuple(
                self.crossing_bytes_per_s[rank] for rank in ranks if self.crossing_bytes_per_s
            ),
            nodes=tuple(self.nodes[rank] for rank in ranks),
            rehearsed=(),
        )


def last(shapes: tuple[tuple[int, ...], ...], elements: int) -> tuple[tuple[int, ...], ...]:
    """The last shapes, with ``elements`` elements together, or a few more: what does not fit whole
    is cut in its first dimension."""
    kept: list[tuple[int, ...]] = []
    left = elements
    for shape in reversed(shapes):
        if left <= 0:
            break
        size = math.prod(shape)
        if size > left and shape:
            row = size // shape[0]
            shape = (-(-left // row), *shape[1:])
        kept.append(shape)
        left -= size
    return tuple(reversed(kept))


_decoder = msgspec.json.Decoder(Measured)


def encode(measured: Measured) -> str:
    """As JSON."""
    return msgspec.json.encode(measured).decode()


def decode(text: str | bytes) -> Measured:
    """``measured`` of ``encode``; ValueError for anything else."""
    try:
        return decoded(_decoder, text, "the measurements of a plan")
    except ProtocolError as error:
        raise ValueError(str(error)) from None
