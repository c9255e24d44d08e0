"""Pairs of members that can't reach each other although both live. Pure.

A member's report names the members that did not answer its call for a link. If they have answered
the probe, there is such a pair. If the links that are left connect all members, the job goes on
with the same members in a group that knows of the pair: its plans spare that link. The pair is
forgotten when one of the two has reached the other again (``Mended``); between two steps the
members then go over to a group that has the link. Agents that are linked by way of a third agent
report such pairs before any worker does (``Severed``)."""

from __future__ import annotations

from collections.abc import Iterable

from potluck._core.cluster.jobs.groups.events import Severed
from potluck._core.cluster.jobs.groups.roster import Pairs, Phase, Turn
from potluck._core.cluster.membership.view import spared
from potluck._core.wire.worker_link import Mended


def pairs_of(pairs: Iterable[tuple[str, str]]) -> Pairs:
    """``pairs`` of workers, each in rising order."""
    return frozenset((min(pair), max(pair)) for pair in pairs)


def noted(turn: Turn, pairs: Pairs, epochs: set[int]) -> None:
    """Members of the groups ``epochs`` can't reach each other: end these groups, and go on without
    the links between ``pairs``."""
    cut = turn.state.cut | pairs
    names = [worker.name for worker in turn.state.having(Phase.MEMBER)]
    which = "; ".join(f"workers {a} and {b} can't reach each other" for a, b in sorted(pairs))
    if spared(cut, names):
        turn.change(cut=cut)
        turn.end_groups(epochs, f"{which}: the group goes on without a link between them")
    else:
        turn.change(cut=frozenset())
        text = "the links that are left do not connect all members, so all are tried again"
        turn.end_groups(epochs, f"{which}; {text}")


def severed(turn: Turn, event: Severed) -> None:
    """What the agents know of the network between their machines. The groups of pairs that are new
    end at once: sooner or later they would wait for a link that is cut."""
    if turn.state.stopping or turn.state.world.is_fixed:
        return
    known = {worker.name for worker in turn.state.workers}
    pairs = pairs_of(pair for pair in event.pairs if set(pair) <= known)
    new, over = pairs - turn.state.severed - turn.state.cut, turn.state.severed - pairs
    members = {worker.name for worker in turn.state.having(Phase.MEMBER)}
    again = sorted(pair for pair in over & turn.state.cut if set(pair) <= members)
    turn.change(severed=pairs, cut=turn.state.cut - over)
    if again:
        which = "; ".join(f"workers {a} and {b} reach each other again" for a, b in again)
        turn.change(mended=which)
    epochs = {
        group.epoch
        for group in turn.state.groups
        if any(set(pair) <= members & set(group.members) for pair in new)
    }
    if epochs:
        noted(turn, new, epochs)
    else:
        turn.change(cut=turn.state.cut | new)


def mended(turn: Turn, event: Mended) -> None:
    """A worker has reached a member again: the next group has the link."""
    group = turn.state.group(event.epoch)
    if group is None or not 0 <= event.rank < len(group.members):
        return
    pairs = pairs_of([(event.worker, group.members[event.rank])])
    if pairs & turn.state.cut:
        reason = f"worker {event.worker} reaches worker {group.members[event.rank]} again"
        turn.change(cut=turn.state.cut - pairs, mended=reason)
