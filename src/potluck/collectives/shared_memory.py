"""How a call goes through shared memory: the numbers that its ranks must agree on.

On a node nothing over links comes near memory that all its ranks share. What is left to choose is
between its two ways of reducing. With ``w`` ranks and ``n`` bytes, every rank

- *at once*: copies ``n`` in, waits once, and combines ``w * n``;
- *in slices*: copies ``n (w - 1) / w`` in, waits, combines ``n`` (its slice of all ranks), keeps
  ``n / w`` of it, waits again, and copies ``n (w - 1) / w`` out.

So slices cost one more wait and save ``n (w - 1) (w - 1) / w`` bytes of work. Source: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, who
weigh latency against bandwidth in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_SLOTS = 4
"""Blocks that rotate: one is written, one combined, one copied out, and one is ahead."""

_CREDIBLE = 10.0
"""A measured cost may differ from the model's by this factor."""

_SPIN_WAKES = 4
_MOST_SPIN_S = 50e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a call take on one node."""

    wait_s: float
    """To learn that another rank has come, while each has a core of its own."""
    turn_s: float
    """The same when they share a core, and the one that waits yields it."""
    wake_s: float
    """The same when the one that waits sleeps."""
    byte_s: float
    """To read one byte that another core has written, and combine or copy it."""


MODEL = Costs(wait_s=0.1e-6, turn_s=1.5e-6, wake_s=5e-6, byte_s=1 / 40e9)
"""What is taken where nothing could be measured."""


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
    """Up to so many bytes every rank combines everything: the point where both ways cost the same.

    ``cores`` is how many processors the ranks share.
    """
    turns = -(-world_size // cores)
    wait_s = costs.wait_s * world_size if turns == 1 else costs.turn_s * turns
    w = world_size
    per_byte = (w - 1) * (w - 1) / w * costs.byte_s * turns
    return int(wait_s / per_byte)


def spin_s(world_size: int, cores: int, costs: Costs = MODEL) -> float:
    """How long a waiting rank keeps its core before it yields, and then sleeps.

    What sleeping and being woken costs, several times over; with more ranks than cores the core is
    what the others wait for.
    """
    if world_size > cores:
        return 0.0
    return min(_SPIN_WAKES * costs.wake_s, _MOST_SPIN_S)
