"""How a call goes through shared memory: the numbers that its ranks must agree on.

Ranks of one node use their shared memory for every call that can go through it: no plan over links
is as fast. The choice that is left is between two ways of reducing. With ``w`` ranks and ``n``
bytes, every rank

- *at once*: copies ``n`` in, waits once, and combines ``w * n``;
- *in slices*: copies ``n (w - 1) / w`` in, waits, combines ``n`` (its slice of all ranks), keeps
  ``n / w`` of it, waits again, and copies ``n (w - 1) / w`` out.

So slices cost one more wait and save ``n (w - 1) (w - 1) / w`` bytes of work. The same trade of
latency for bandwidth is in Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_SLOTS = 4
"""Slots of each rank, used in rotation. The pipeline has three stages (copy in, combine, copy out),
each at another block; the fourth slot lets a fast rank copy in the next block meanwhile."""

_CREDIBLE = 10.0
"""A measured cost may differ from the model's by this factor."""

_SPIN_WAKES = 4
_MOST_SPIN_S = 50e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a call take on one node."""

    wait_s: float
    """To see that another rank has arrived, when each rank has a core of its own."""
    turn_s: float
    """The same when both ranks share a core, and the waiting rank yields it."""
    wake_s: float
    """The same when the waiting rank sleeps."""
    byte_s: float
    """To read one byte that another core has written, and combine or copy it."""


MODEL = Costs(wait_s=0.1e-6, turn_s=1.5e-6, wake_s=5e-6, byte_s=1 / 40e9)
"""The costs that are assumed where they could not be measured."""


def credible(measured: Costs) -> Costs:
    """``measured``, with the model's figure for each that is far from it (or 0: not measured).

    A machine that is busy at that moment measures how busy it is.
    """

    def chosen(value: float, model: float) -> float:
        return value if model / _CREDIBLE <= value <= model * _CREDIBLE else model

    return Costs(
        wait_s=chosen(measured.wait_s, MODEL.wait_s),
        turn_s=chosen(measured.turn_s, MODEL.turn_s),
        wake_s=chosen(measured.wake_s, MODEL.wake_s),
        byte_s=chosen(measured.byte_s, MODEL.byte_s),
    )


def small_bytes(world_size: int, cores: int, costs: Costs = MODEL) -> int:
    """The size in bytes at which both ways cost the same. Up to it every rank combines everything.

    ``cores`` is how many processors the ranks share.
    """
    turns = -(-world_size // cores)
    wait_s = costs.wait_s * world_size if turns == 1 else costs.turn_s * turns
    w = world_size
    per_byte = (w - 1) * (w - 1) / w * costs.byte_s * turns
    return int(wait_s / per_byte)


def spin_s(world_size: int, cores: int, costs: Costs = MODEL) -> float:
    """How long a waiting rank keeps its core before it yields, and then sleeps.

    Several times what a sleep with its wake-up costs. 0 with more ranks than cores: the other ranks
    need the core that this rank would spin on.
    """
    if world_size > cores:
        return 0.0
    return min(_SPIN_WAKES * costs.wake_s, _MOST_SPIN_S)
