"""What a caller may say to a server, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck.errors import ProtocolError
from potluck.parameter_server import SGD, Synchronous
from potluck.parameter_server.entries import Save, encode
from potluck.parameter_server.follower import Follower
from potluck.parameter_server.host import Host
from potluck.parameter_server.layout import layout_of, plain
from potluck.parameter_server.offer import FollowerOffer, Offer
from potluck.parameter_server.placement import server_of
from potluck.parameter_server.signals import AskAgain, OutOfStep
from potluck.services import Call
from potluck.services.presence import Presence
from potluck.types import Group, Member

SERVERS = ("0", "1")
GROUP = Group(1, 0, (Member("0"), Member("1"), Member("2")))
HERE = next(name for name in "abcdefgh" if server_of(name, SERVERS) == "0")


def call(worker: str, method: str = "") -> Call:
    return Call("node", worker, int(worker), "parameters", method, 1.0)


def first() -> Offer:
    presence = Presence(lambda: GROUP, 30.0)
    host = Host(
        Synchronous(),
        SGD(1.0),
        presence,
        servers=SERVERS,
        store=None,
        save_every=1,
        worker_timeout_s=30.0,
    )
    host.load(None)
    host.open(1, 7)
    return Offer(host)


def second() -> FollowerOffer:
    follower = Follower(SGD(1.0), "1", SERVERS, None)
    follower.load(None, 7, 1)
    return FollowerOffer(follower, "0")


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("follow", (7, 2, encode([Save()]))), ("checkpoints", ()), ("load", (None, 8, 9))],
)
def test_only_the_first_server_orders_the_others(method: str, arguments: tuple[Any, ...]) -> None:
    offer = second()
    with pytest.raises(ValueError, match=f"{method} is for worker 0, the first server"):
        getattr(offer, method)(call("2", method), *arguments)
    getattr(offer, method)(call("0", method), *arguments)


def test_entries_that_do_not_follow_are_refused_and_repeats_change_nothing() -> None:
    offer = second()
    for wrong in ((8, 2), (7, 3)):
        with pytest.raises(OutOfStep):
            offer.follow(call("0"), *wrong, encode([Save()]))
    for _ in range(2):
        assert offer.follow(call("0"), 7, 2, encode([Save()]))["saved"] == 0
    with pytest.raises(ProtocolError, match="no log of a parameter server"):
        offer.follow(call("0"), 7, 3, b"junk")
    offer.follow(call("0"), 7, 3, encode([Save()]))


def test_a_server_without_a_state_is_to_be_asked_again() -> None:
    offer = FollowerOffer(Follower(SGD(1.0), "1", SERVERS, None), "0")
    with pytest.raises(AskAgain):
        offer.fetch(call("2"), "m", 0, 7, 0.0).result(0)


def test_a_push_that_was_never_staged_is_refused_and_the_model_stays_whole() -> None:
    offer = first()
    tensors = {HERE: np.zeros(2)}
    layout = plain(layout_of(tensors))
    with pytest.raises(ValueError, match="was not staged on worker 0"):
        offer.create(call("2"), "m", None, layout, 1, False, [7])
    offer.stage(call("2"), "m", tensors, layout, 0, 1, 0.0).result(0)
    # A server began anew since, and lost what was staged: not to be asked the same again.
    assert "waits_for" in offer.create(call("2"), "m", None, layout, 1, False, [6])
    assert offer.create(call("2"), "m", None, layout, 1, False, [7]) == {"version": 0}
    with pytest.raises(ValueError, match="of worker 2 for 'm' was not staged on worker 0"):
        offer.push(call("2"), "m", None, 0, 2, 7)
    assert offer.stats(call("2")) == {"m": {"version": 0}}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1000, 7])
def test_a_models_name_is_short_and_printable(name: Any) -> None:
    with pytest.raises(ValueError, match="a model's name is 1 to"):
        second().fetch(call("2"), name, 0, 7, 0.0)
    with pytest.raises(ValueError, match="a model's name is 1 to"):
        first().create(call("2"), name, {}, {}, 1, False, [])


@pytest.mark.parametrize("tensors", [None, [1], {"w": [1.0]}, {3: np.zeros(1)}])
def test_what_is_staged_is_arrays_by_name(tensors: Any) -> None:
    with pytest.raises(TypeError, match=r"dict of arrays|is not the name of an array"):
        second().stage(call("2"), "m", tensors, None, 0, 1, 0.0)
