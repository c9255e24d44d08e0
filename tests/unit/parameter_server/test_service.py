"""What a caller may say to a server, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck._core.types import Group, Member
from potluck.errors import ProtocolError
from potluck.parameter_server import SGD, Asynchronous, Synchronous
from potluck.parameter_server.layout import holders, layout_of, plain
from potluck.parameter_server.log import Save, encode
from potluck.parameter_server.primary import Primary
from potluck.parameter_server.replica import AskAgain, Replica
from potluck.parameter_server.service import PrimaryService, ReplicaService, StaleTerm
from potluck.services import Call
from potluck.services.presence import Presence

SERVERS = ("0", "1")
GROUP = Group(1, 0, (Member("0"), Member("1"), Member("2")))
HERE = next(name for name in "abcdefgh" if holders(name, SERVERS) == ("0",))


def call(worker: str, method: str = "") -> Call:
    return Call("node", worker, int(worker), "parameters", method, 1.0)


class Served(PrimaryService, ReplicaService):
    """What one of two servers answers."""

    def __init__(self, server: str, copies: int = 1) -> None:
        presence = Presence(lambda: GROUP, 30.0)
        replica = Replica(Synchronous(), SGD(1.0), presence, server, SERVERS, copies)
        primary = Primary(replica, checkpoints=None, save_every=1, worker_timeout_s=30.0)
        PrimaryService.__init__(self, primary)
        ReplicaService.__init__(self, replica, None)


def begun(server: str) -> Served:
    """The servers have agreed on a state without models."""
    served = Served(server)
    served.prepare(call("0"), 7)
    served.load(call("0"), 7, None)
    served.begin(call("0"), 7, [7, 0], 0)
    if server == "0":
        served._primary.lead(7, SERVERS)
    return served


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("prepare", (8,)),
        ("append", (8, [7, 0], [7, 0], encode([]))),
        ("describe", (8,)),
        ("install", (8, {}, [])),
        ("load", (8, None)),
        ("begin", (8, [7, 0], 9)),
        ("append", (8, [7, 0], [8, 1], encode([Save(1)]))),
    ],
)
def test_only_the_primary_orders_the_others(method: str, arguments: tuple[Any, ...]) -> None:
    served = begun("1")
    served.prepare(call("0"), 8)
    for worker in ("1", "2"):
        with pytest.raises(ValueError, match=f"{method} is for the primary, worker 0$"):
            getattr(served, method)(call(worker, method), *arguments)
    getattr(served, method)(call("0", method), *arguments)


def test_copies_are_read_and_installed_for_the_primary_alone() -> None:
    tensors = {HERE: np.ones(2)}
    layout = plain(layout_of(tensors))
    holder = begun("0")
    holder.stage(call("2"), "m", tensors, layout, 0, 1, 0.0).result(0)
    assert holder.create(call("2"), "m", None, layout, 1, False, {"0": 7}) == {"version": 0}
    holder.prepare(call("0"), 8)
    models, gone = holder.describe(call("0"), 8)
    part = holder.read(call("0"), 8, "m", [HERE])
    again = begun("0")
    again.prepare(call("0"), 8)
    again.install(call("0"), 8, models, gone)
    for worker in ("1", "2"):
        for served, method, arguments in (
            (holder, "read", (8, "m", [HERE])),
            (again, "install_part", (8, "m", part)),
        ):
            with pytest.raises(ValueError, match=f"{method} is for the primary, worker 0$"):
                getattr(served, method)(call(worker, method), *arguments)
    again.install_part(call("0"), 8, "m", part)
    np.testing.assert_array_equal(again._replica.models["m"].table.tensors[HERE], tensors[HERE])


def test_where_another_server_may_take_over_any_of_them_orders_and_no_worker() -> None:
    served = Served("1", copies=2)
    served.prepare(call("0"), 8)
    served.prepare(call("1"), 9)
    with pytest.raises(ValueError, match="prepare is for the primary, worker 0 or 1"):
        served.prepare(call("2", "prepare"), 10)
    # The primary of an earlier term has no effect any more.
    for method, arguments in (
        ("prepare", (8,)),
        ("describe", (8,)),
        ("begin", (8, [8, 0], 1)),
        ("append", (8, [0, 0], [0, 0], encode([]))),
    ):
        with pytest.raises(StaleTerm, match="a primary of term 9 was heard"):
            getattr(served, method)(call("0"), *arguments)


def test_a_primary_that_has_promised_another_answers_no_more() -> None:
    served = begun("0")
    assert served.stats(call("2")) == {}
    served.prepare(call("0"), 8)
    for ask in (served.stats, lambda it: served.pull(it, "m", None, 0.0, False)):
        with pytest.raises(AskAgain, match="have not agreed"):
            ask(call("2"))
    served.begin(call("0"), 8, [7, 0], 1)
    with pytest.raises(AskAgain, match="have not agreed"):
        served.stats(call("2"))  # another one leads


def test_entries_that_do_not_follow_are_refused_and_repeats_change_nothing() -> None:
    served = begun("1")
    log = served._replica.log
    for wrong in ((8, [7, 0], [8, 1]), (7, [7, 1], [7, 2]), (7, [6, 0], [7, 1])):
        assert not served.append(call("0"), *wrong, encode([Save(1)]))["in_step"]
        assert log.last == (7, 0)
    for _ in range(2):
        reply = served.append(call("0"), 7, [7, 0], [7, 1], encode([Save(1)]))
        assert reply["in_step"]
        assert reply["saved"] == 0
        assert log.last == (7, 1)
    with pytest.raises(ProtocolError, match="not the log of a parameter server"):
        served.append(call("0"), 7, [7, 1], [7, 2], b"junk")
    assert served.append(call("0"), 7, [7, 1], [7, 2], encode([Save(2)]))["in_step"]
    assert (log.committed, log.last) == ((7, 1), (7, 2))


def test_a_server_without_a_state_is_to_be_asked_again() -> None:
    served = Served("1")
    with pytest.raises(AskAgain):
        served.fetch(call("2"), "m", 0, 7, [], 0.0).result(0)


def test_a_push_that_was_never_staged_is_refused_and_the_model_stays_whole() -> None:
    served = begun("0")
    tensors = {HERE: np.zeros(2)}
    layout = plain(layout_of(tensors))
    with pytest.raises(ValueError, match="was not staged on worker 0"):
        served.create(call("2"), "m", None, layout, 1, False, {"0": 7})
    served.stage(call("2"), "m", tensors, layout, 0, 1, 0.0).result(0)
    # A server came or began anew since, and has not what was staged: stage it there, too.
    assert served.create(call("2"), "m", None, layout, 1, False, {"0": 6}) is None
    assert served.create(call("2"), "m", None, layout, 1, False, {}) is None
    assert served.create(call("2"), "m", None, layout, 1, False, {"0": 7}) == {"version": 0}
    assert served.push(call("2"), "m", None, 0, 2, 7, {}) is None
    with pytest.raises(ValueError, match="of worker 2 for 'm' was not staged on worker 0"):
        served.push(call("2"), "m", None, 0, 2, 7, {"0": 7})
    assert served.stats(call("2")) == {"m": {"version": 0}}


def test_a_worker_that_is_lost_with_old_parameters_holds_up_nobody() -> None:
    groups = [GROUP]
    replica = Replica(Asynchronous(0), SGD(1.0), Presence(lambda: groups[0], 1e6))
    primary = Primary(replica, checkpoints=None, save_every=1, worker_timeout_s=1e6)
    served = PrimaryService(primary)
    tensors = {"w": np.zeros(2)}
    served.create(call("0"), "m", tensors, plain(layout_of(tensors)), 1, False, {})
    assert served.pull(call("2"), "m", None, 5.0, True).result(0)["version"] == 0
    waiting = served.pull(call("1"), "m", None, 0.0, True).result(0)
    assert waiting == {"waits_for": "worker 2, which computes on the oldest parameters"}
    groups[0] = Group(2, 0, (Member("0"), Member("1")))
    assert served.pull(call("1"), "m", None, 0.0, True).result(0)["version"] == 0


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
