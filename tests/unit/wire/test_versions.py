"""Two releases on one connection: which version they speak, and what is not said to the older."""

from __future__ import annotations

import msgspec
import pytest

from potluck._core.wire import jobs, peers, worker_link
from potluck._core.wire.format import UnknownMessage
from potluck._core.wire.greeting import GREETING, Hello, Welcome, common_version, sent_greeting
from potluck._core.wire.versions import KNOWN, NEWEST, OLDEST
from potluck.errors import ProtocolError


@pytest.mark.parametrize(
    ("version", "newest", "common"),
    [
        (1, 0, 1),  # the first release says no newest one
        (1, 2, 2),
        (1, 9, NEWEST),
        (NEWEST, NEWEST, NEWEST),
        (NEWEST + 1, NEWEST + 3, 0),
        (OLDEST - 1, 0, 0),
    ],
)
def test_two_releases_speak_the_newest_version_that_both_know(
    version: int, newest: int, common: int
) -> None:
    assert common_version(Hello("node", version=version, newest=newest)) == common
    assert common_version(Welcome(version=version, newest=newest)) == common


def test_a_greeting_says_all_versions_and_is_accepted_by_the_first_release() -> None:
    for message in (Hello("node"), Welcome(rank=1)):
        said = GREETING.decode(sent_greeting(message)[4:])
        assert isinstance(said, Hello | Welcome)
        assert (said.version, said.newest) == (
            1,
            NEWEST,
        )  # that release compares ``version`` with 1


def test_a_message_is_for_peers_that_know_its_type_and_what_it_carries() -> None:
    known = peers.MESSAGE.is_known
    old = peers.Request(1, jobs.JobRunsRequest(1))
    new = peers.Request(1, jobs.HistoryRequest("j"))
    event = jobs.WorkerEvent("j", worker_link.Finished("0"))
    assert all(known(each, 1) and known(each, NEWEST) for each in (old, event, peers.Offer()))
    assert not known(new, 1)
    assert not known(peers.BulkCall(), 1)
    assert known(new, NEWEST)
    assert all(version < NEWEST for version in KNOWN)


@pytest.mark.parametrize(
    ("body", "kind", "number"),
    [
        ({"type": "Levitate", "height": 3}, "Levitate", 0),
        ({"type": "Request", "number": 7, "content": {"type": "Fly"}}, "Fly", 7),
        ({"type": "Response", "number": 7, "content": {"type": "Fly"}}, "Fly", 0),
        ({"type": "x\x1b[2J" + 99 * "y", "number": 7}, None, 0),
    ],
)
def test_a_type_of_another_release_is_told_from_a_damaged_message(
    body: dict[str, object], kind: str | None, number: int
) -> None:
    with pytest.raises(UnknownMessage) as caught:
        peers.MESSAGE.decode(msgspec.msgpack.encode(body))
    assert caught.value.number == number
    if kind is None:
        assert caught.value.kind.isprintable()
        assert len(str(caught.value)) < 200
    else:
        assert caught.value.kind == kind


@pytest.mark.parametrize("body", [b"\xc1", b"", msgspec.msgpack.encode({"type": "Ping"})])
def test_a_damaged_message_is_no_message_of_another_release(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        peers.MESSAGE.decode(body)
    assert not isinstance(caught.value, UnknownMessage)
