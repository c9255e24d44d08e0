"""When the window pays, and how: the numbers that its ranks must agree on.

A window moves data through memory that all ranks of a node share, so on a node nothing over links
comes near it. What is left to choose is between its two ways of reducing. With ``w`` ranks and
``n`` bytes, every rank

- *at once*: copies ``n`` in, waits once, and combines ``w * n``;
- *in slices*: copies ``n (w - 1) / w`` in, waits, combines ``n`` (its slice of all ranks), waits
  again, and copies ``n (w - 1) / w`` out.

So slices cost one more wait and save ``(w - 1 - 2 (w - 1) / w + 1 / w) n`` bytes of work, which
is ``n (w * w - 3 w + 3) / w``. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005, who weigh latency against bandwidth in the same way.
"""

from __future__ import annotations

NUM_SLOTS = 4
"""Blocks that rotate: one is written, one combined, one copied out, and one is ahead."""

_WAIT_S = 0.4e-6
"""To learn that another rank has come, while each has a core of its own."""

_SWITCH_S = 3e-6
"""The same when it must be woken, on a core that others run on."""

_BYTE_S = 1 / 8e9
"""To read one byte that another core has written, and combine or copy it."""


def small_bytes(world_size: int, cores: int) -> int:
    """Up to so many bytes every rank combines everything: the point where both ways cost the same.

    ``cores`` is how many processors the ranks share.
    """
    switches = -(-world_size // cores)
    wait_s = _WAIT_S * world_size if switches == 1 else _SWITCH_S * switches
    w = world_size
    per_byte = (w * w - 3 * w + 3) / w * _BYTE_S * switches
    return int(wait_s / per_byte)


def spin_s(world_size: int, cores: int) -> float:
    """How long a waiting rank may keep its core before it sleeps.

    About what sleeping and being woken costs, several times over; with more ranks than cores the
    core is what the others wait for.
    """
    return 20e-6 if world_size <= cores else 0.0
