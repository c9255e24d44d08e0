"""Whose jobs a machine runs. Pure.

The owner gives a rule for all members (``potluck up --run-for``) and decides about single members
(``potluck allow``, ``potluck deny``, or the answer to a question of ``potluck up``). A rule that
differs from the one given last replaces all earlier decisions; a decision holds until the opposite
one. Who gave no rule is asked about each member.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from potluck._core.wire.peers import MAX_DECISIONS, Offer, Rule
from potluck.errors import ConfigurationError

RULES: tuple[Rule, ...] = ("all", "ask", "none")


class Kept(msgspec.Struct, frozen=True):
    """The owner's rule and decisions, as they are kept on disk. ``given`` is the text of the rule
    that the owner gave last: a service gives it at each start."""

    rule: Rule = "ask"
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    is_paused: bool = False
    given: str = ""

    def offer(self) -> Offer:
        """What the other nodes are told."""
        return Offer(self.rule, self.allowed, self.denied, self.is_paused)


def ruled(kept: Kept, text: str, find: Callable[[str], str]) -> Kept:
    """``kept`` after ``--run-for TEXT``: a rule, or the allowed nodes with commas between.
    ``find(name)`` is a node's id. Unchanged if the rule was given before: later decisions hold.
    ConfigurationError if ``text`` names no node."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    given = ",".join(words)
    if given and given == kept.given:
        return kept
    for rule in RULES:
        if words == [rule]:
            return Kept(rule, is_paused=kept.is_paused, given=given)
    if not words or set(words) & set(RULES):
        raise ConfigurationError(
            f"--run-for {text!r}: write all, ask or none, or names or ids of nodes with commas"
        )
    nodes = tuple(dict.fromkeys(find(word) for word in words))
    return Kept("none", allowed=nodes, is_paused=kept.is_paused, given=given)


def decided(kept: Kept, node: str, *, is_allowed: bool) -> Kept:
    """``kept`` after the owner's decision about ``node``. ConfigurationError if there are too many
    decisions already."""
    allowed = (*_without(kept.allowed, node), *((node,) if is_allowed else ()))
    denied = (*_without(kept.denied, node), *(() if is_allowed else (node,)))
    if max(len(allowed), len(denied)) > MAX_DECISIONS:
        raise ConfigurationError(
            f"{MAX_DECISIONS} nodes were decided about already; begin anew with a rule: "
            "potluck up --run-for all, ask or none"
        )
    return msgspec.structs.replace(kept, allowed=allowed, denied=denied)


def forgotten(kept: Kept, nodes: Collection[str]) -> Kept:
    """``kept`` after ``nodes`` were banned: the owner's yes is no yes to what comes back after a
    ban, nor is the rule `all`. ConfigurationError as for ``decided``."""
    for node in nodes:
        if kept.rule == "all":
            kept = decided(kept, node, is_allowed=False)
        else:
            kept = msgspec.structs.replace(kept, allowed=_without(kept.allowed, node))
    return kept


def is_allowed(offer: Offer, node: str) -> bool | None:
    """Whether jobs of ``node`` run under ``offer``; None if its owner has still to decide."""
    if node in offer.denied:
        return False
    if node in offer.allowed or offer.rule == "all":
        return True
    return None if offer.rule == "ask" else False


def objection(offer: Offer, *, is_own: bool, starter: str, called: Callable[[str], str]) -> str:
    """Why the node of ``offer`` runs no job of ``starter``, which may be that node itself, and what
    to do; empty if it does."""
    if offer.is_paused and is_own and offer == Offer("none", is_paused=True):
        return "it starts jobs only, while it is paused"
    if offer.is_paused:
        return "its owner paused it; `potluck resume` there lets it take part"
    verdict = True if is_own else is_allowed(offer, starter)
    if verdict:
        return ""
    hint = f"`potluck allow {starter[:8]}` there lets it"
    if verdict is None:
        return f"its owner has not decided yet whether it runs jobs of {called(starter)}; {hint}"
    return f"its owner does not let it run jobs of {called(starter)}; {hint}"


def who_may(offer: Offer, called: Callable[[str], str]) -> str:
    """Whose jobs run under ``offer``, in a few words."""
    allowed, denied = _listed(offer.allowed, called), _listed(offer.denied, called)
    if offer.rule == "all":
        return f"all but {denied}" if denied else "all"
    if offer.rule == "ask":
        return f"{allowed}; asked for others" if allowed else "asked for each"
    return allowed or "none"


def undecided(offer: Offer, nodes: Iterable[str]) -> tuple[str, ...]:
    """Those of ``nodes`` about which the owner is to be asked."""
    return tuple(node for node in nodes if is_allowed(offer, node) is None)


def _listed(nodes: Collection[str], called: Callable[[str], str]) -> str:
    shown = [called(node) for node in nodes][:8]
    more = len(nodes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _without(nodes: Iterable[str], node: str) -> tuple[str, ...]:
    return tuple(each for each in nodes if each != node)
