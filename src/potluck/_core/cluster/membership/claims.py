"""Claims: what the heartbeats of peers say about a history, and when enough of them agree.

One peer can claim anything. So a node that is no member of a history believes what several peers
say independently: a view of it counts once most peers that claim the history use that very view.
Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from potluck._core.cluster.membership.failure_detector import PeerHealth, Status
from potluck._core.cluster.membership.view import has_majority
from potluck._core.wire.nodes import Heartbeat, View, ViewMember

_UNCONFIRMED = 1 << 10

Peers = Mapping[str, PeerHealth]


def digest_of(view: View) -> bytes:
    """A hash of ``view``. No two views have the same, also if a liar chooses one of them."""
    return hashlib.blake2b(msgspec.msgpack.encode(view), digest_size=16).digest()


def claims_of(peers: Peers, history: str) -> list[Heartbeat]:
    """The last heartbeats of the peers that claim ``history``. Those of peers without a working
    link count only if there are no others, and likewise claims of paused peers: their view may be
    an old one."""
    claims = [
        (peer.status is Status.UP, peer.last)
        for peer in peers.values()
        if peer.last is not None and peer.last.history == history
    ]
    known = [beat for is_up, beat in claims if is_up] or [beat for _, beat in claims]
    return [beat for beat in known if not beat.paused] or known


def is_confirmed(peers: Peers, view: View) -> bool:
    """Whether more than half of the peers that claim the history of ``view`` use ``view``."""
    claims = claims_of(peers, view.history)
    digest = digest_of(view) if claims else b""
    return 2 * sum(beat.digest == digest for beat in claims) > len(claims)


def confirmed_epoch(peers: Peers, history: str, used: int) -> int:
    """The highest epoch of ``history`` that at least half of its claims have reached; -1 without a
    claim. One liar can't lift it above that of the honest peers, and where it is the only one, not
    far above ``used``, the highest epoch that this node ever used."""
    epochs = sorted(beat.epoch for beat in claims_of(peers, history))
    if len(epochs) == 1:
        return min(epochs[0], used + _UNCONFIRMED)
    return epochs[(len(epochs) - 1) // 2] if epochs else -1


def is_still_used(
    peers: Peers, view: View, me: str, subtracted: Collection[ViewMember] = ()
) -> bool:
    """Whether a majority of the members of ``view``, ``me`` among them, uses it: so no view was
    decided without ``me``, whatever a single member claims."""
    using = {me}
    for member in view.members:
        peer = peers.get(member.node)
        if (
            peer is not None
            and peer.status is Status.UP
            and peer.incarnation == member.incarnation
            and peer.last is not None
            and peer.last.history == view.history
            and peer.last.epoch <= view.epoch
        ):
            using.add(member.node)
    return has_majority(view.members, using, {member.node for member in subtracted})
