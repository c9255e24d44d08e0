"""What a caller may say to a server, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck._core.types import Group, Member
from potluck.errors import ProtocolError
from potluck.parameter_server import SGD, Asynchronous, Synchronous
from potluck.parameter_server.entries import Save, encode
from potluck.parameter_server.follower import Follower
from potluck.parameter_server.host import Host
from potluck.parameter_server.layout import layout_of, plain
from potluck.parameter_server.offer import SharedOffer
from potluck.parameter_server.placement import holders
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.signals import AskAgain, OutOfStep
from potluck.services import Call
from potluck.services.presence import Presence

SERVERS = ("0", "1")
GROUP = Group(1, 0, (Member("0"), Member("1"), Member("2")))
HERE = next(name for name in "abcdefgh" if holders(name, SERVERS) == ("0",))


def call(worker: str, method: str = "") -> Call:
    return Call("node", worker, int(worker), "parameters", method, 1.0)


def offer_of(server: str, copies: int = 1) -> SharedOffer:
    """That of one of two servers which have agreed on a state without models."""
    presence = Presence(lambda: GROUP, 30.0)
    replica = Replica(Synchronous(), SGD(1.0), presence, server, SERVERS, copies)
    host = Host(replica, checkpoints=None, save_every=1, worker_timeout_s=30.0)
    return SharedOffer(host, replica, Follower(replica, None), lambda: None)


def begun(server: str) -> SharedOffer:
    offer = offer_of(server)
    offer.join(call("0"), 7)
    offer.load(call("0"), 7, None)
    offer.begin(call("0"), 7, 1, [7, 0])
    if server == "0":
        offer._host.lead(7, SERVERS)
    return offer


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("join", (8,)),
        ("kept", (8,)),
        ("catch_up", (8, [7, 0], [7, 0], encode([]))),
        ("models", (8,)),
        ("take", (8, {}, [])),
        ("load", (8, None)),
        ("begin", (8, 9, [7, 0])),
        ("follow", (8, 10, encode([Save()]))),
    ],
)
def test_only_the_first_server_orders_the_others(method: str, arguments: tuple[Any, ...]) -> None:
    offer = begun("1")
    offer.join(call("0"), 8)
    if method == "follow":
        offer.begin(call("0"), 8, 9, [7, 0])
    for worker in ("1", "2"):
        with pytest.raises(ValueError, match=f"{method} is for the first server, worker 0$"):
            getattr(offer, method)(call(worker, method), *arguments)
    getattr(offer, method)(call("0", method), *arguments)


def test_where_another_server_may_take_over_any_of_them_orders_and_no_worker() -> None:
    offer = offer_of("1", copies=2)
    offer.join(call("0"), 8)
    offer.join(call("1"), 9)
    with pytest.raises(ValueError, match="join is for the first server, worker 0 or 1"):
        offer.join(call("2", "join"), 10)
    # The one before is heard no more.
    for method, arguments in (("join", (8,)), ("kept", (8,)), ("begin", (8, 1, [8, 0]))):
        with pytest.raises(OutOfStep, match="a first server of incarnation 9 was heard"):
            getattr(offer, method)(call("0"), *arguments)


def test_a_first_server_that_has_joined_another_answers_no_more() -> None:
    offer = begun("0")
    assert offer.stats(call("2")) == {}
    offer.join(call("0"), 8)
    for ask in (offer.stats, lambda it: offer.pull(it, "m", None, 0.0, False)):
        with pytest.raises(AskAgain, match="have not agreed"):
            ask(call("2"))
    offer.begin(call("0"), 8, 1, [7, 0])
    with pytest.raises(AskAgain, match="have not agreed"):
        offer.stats(call("2"))  # another one leads


def test_entries_that_do_not_follow_are_refused_and_repeats_change_nothing() -> None:
    offer = begun("1")
    for wrong in ((8, 2), (7, 3)):
        with pytest.raises(OutOfStep):
            offer.follow(call("0"), *wrong, encode([Save()]))
    for _ in range(2):
        assert offer.follow(call("0"), 7, 2, encode([Save()]))["saved"] == 0
    with pytest.raises(ProtocolError, match="not the log of a parameter server"):
        offer.follow(call("0"), 7, 3, b"junk")
    offer.follow(call("0"), 7, 3, encode([Save()]))


def test_a_server_without_a_state_is_to_be_asked_again() -> None:
    offer = offer_of("1")
    with pytest.raises(AskAgain):
        offer.fetch(call("2"), "m", 0, 7, [], 0.0).result(0)


def test_a_push_that_was_never_staged_is_refused_and_the_model_stays_whole() -> None:
    offer = begun("0")
    tensors = {HERE: np.zeros(2)}
    layout = plain(layout_of(tensors))
    with pytest.raises(ValueError, match="was not staged on worker 0"):
        offer.create(call("2"), "m", None, layout, 1, False, {"0": 7})
    offer.stage(call("2"), "m", tensors, layout, 0, 1, 0.0).result(0)
    # A server came or began anew since, and has not what was staged: stage it there, too.
    assert offer.create(call("2"), "m", None, layout, 1, False, {"0": 6}) is None
    assert offer.create(call("2"), "m", None, layout, 1, False, {}) is None
    assert offer.create(call("2"), "m", None, layout, 1, False, {"0": 7}) == 0
    assert offer.push(call("2"), "m", None, 0, 2, 7, {}) is None
    with pytest.raises(ValueError, match="of worker 2 for 'm' was not staged on worker 0"):
        offer.push(call("2"), "m", None, 0, 2, 7, {"0": 7})
    assert offer.stats(call("2")) == {"m": {"version": 0}}


def test_a_worker_that_is_lost_with_old_parameters_holds_up_nobody() -> None:
    groups = [GROUP]
    replica = Replica(Asynchronous(0), SGD(1.0), Presence(lambda: groups[0], 1e6))
    host = Host(replica, checkpoints=None, save_every=1, worker_timeout_s=1e6)
    tensors = {"w": np.zeros(2)}
    host.create("m", tensors, "0", 1, layout=layout_of(tensors))
    assert host.pull("m", "2", None, 5.0, compute=True).result(0)["version"] == 0
    waiting = host.pull("m", "1", None, 0.0, compute=True).result(0)
    assert waiting == {"waits_for": "worker 2, which computes on the oldest parameters"}
    groups[0] = Group(2, 0, (Member("0"), Member("1")))
    assert host.pull("m", "1", None, 0.0, compute=True).result(0)["version"] == 0


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1000, 7])
def test_a_models_name_is_short_and_printable(name: Any) -> None:
    with pytest.raises(ValueError, match="a model's name is 1 to"):
        begun("1").fetch(call("2"), name, 0, 7, [], 0.0)
    with pytest.raises(ValueError, match="a model's name is 1 to"):
        begun("0").create(call("2"), name, {}, {}, 1, False, {})


@pytest.mark.parametrize("tensors", [None, [1], {"w": [1.0]}, {3: np.zeros(1)}])
def test_what_is_staged_is_arrays_by_name(tensors: Any) -> None:
    with pytest.raises(TypeError, match=r"dict of arrays|is not the name of an array"):
        begun("1").stage(call("2"), "m", tensors, None, 0, 1, 0.0)
