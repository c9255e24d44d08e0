"""The store of a job on rank 0: which links it takes, and what one of them can do to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from potluck._core.engine.mesh import Switchboard
from potluck._core.transport.blocking import receive, send_all
from potluck._core.transport.handshake import connect
from potluck._core.transport.listener import Listener
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Group, Member
from potluck._core.wire.greeting import Hello
from potluck.errors import LinkError, Refused
from potluck.torch.process_group.store import LinkStore
from potluck.torch.process_group.store_client import StoreClient
from potluck.torch.process_group.store_messages import ANSWER, KIND, REQUEST, StoreRequest
from potluck.torch.process_group.store_server import StoreServer
from potluck.torch.process_group.store_values import KEY_OVERHEAD
from support.links import new_credentials

EPOCH = 5
PATIENCE_S = 60.0
NODES = [new_credentials() for _ in range(3)]
STRANGER = new_credentials()


class Job:
    """Rank 0 of three, with its store; the other ranks are the test's."""

    def __init__(self, **options: float) -> None:
        self.links: list[TcpLink] = []
        self.listener = Listener("127.0.0.1", 0, NODES[0])
        self.group = Group(
            EPOCH,
            0,
            tuple(
                Member(str(rank), node.node_id, "127.0.0.1", self.listener.port)
                for rank, node in enumerate(NODES)
            ),
            job="j",
        )
        self.switchboard = Switchboard(self.listener, NODES[0], wait_s=5.0)
        self.server = StoreServer(self.group, self.switchboard, **options)  # type: ignore[arg-type]
        self.store = LinkStore(self.server, PATIENCE_S)

    def link(self, rank: int, /, credentials=None, **fields: object) -> TcpLink:
        credentials = credentials or NODES[rank]
        hello = Hello(KIND, job="j", epoch=EPOCH, rank=rank, to_rank=0)
        link, _ = connect(
            "127.0.0.1",
            self.listener.port,
            msgspec.structs.replace(hello, **fields),
            credentials,
            deadline=time.monotonic() + PATIENCE_S,
        )
        self.links.append(link)
        return link

    def end(self) -> None:
        for link in self.links:
            link.close()
        self.server.close()
        self.switchboard.close()


@pytest.fixture
def job_of() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**options: float) -> Job:
        jobs.append(Job(**options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def ask(link: TcpLink, what: str, *keys: str, value: bytes | None = None, amount: int = 0):
    request = StoreRequest(7, what, list(keys), [] if value is None else [value], amount)
    send_all(link, REQUEST.encode(request), time.monotonic() + PATIENCE_S)
    return receive(link, ANSWER, time.monotonic() + PATIENCE_S)


NO_RANK = [
    (STRANGER, {}, "identity", "rank 1 is on node .*, not on"),
    (NODES[2], {}, "identity", "rank 1 is on node .*, not on"),
    (NODES[1], {"job": "another"}, "job", "in job 'j', not 'another'"),
    (NODES[1], {"epoch": EPOCH - 1}, "stale", "this store is of epoch 5, not 4"),
    (NODES[1], {"to_rank": 2}, "rank", "this worker is rank 0, not 2"),
    (NODES[1], {"rank": 0}, "duplicate", "rank 0 can't call rank 0"),
    (NODES[1], {"rank": 3}, "duplicate", "rank 3 can't call rank 0 in a world of 3"),
    (STRANGER, {"rank": -1}, "duplicate", "rank -1 can't call rank 0"),
]


@pytest.mark.parametrize(("credentials", "fields", "code", "reason"), NO_RANK)
def test_a_store_takes_the_ranks_of_its_job_only(
    job_of: Callable[..., Job], credentials, fields: dict[str, object], code: str, reason: str
) -> None:
    job = job_of()
    with pytest.raises(Refused, match=reason) as caught:
        job.link(1, credentials, **fields)
    assert caught.value.code == code


def test_a_rank_has_one_link_to_the_store(job_of: Callable[..., Job]) -> None:
    job = job_of()
    first = job.link(1)
    with pytest.raises(Refused, match="rank 1 has a link to the store already"):
        job.link(1)
    assert ask(first, "set", "key", value=b"1").error == "", "the first one is not disturbed"
    assert job.store.get("key") == b"1"


def test_a_rank_whose_link_was_lost_may_call_again(job_of: Callable[..., Job]) -> None:
    job = job_of()
    job.link(1).close()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            again = job.link(1)
            break
        except Refused:  # the store has not seen the end yet
            assert time.monotonic() < deadline
    assert ask(again, "count").value == 0


def test_a_rank_that_stops_within_a_request_holds_up_no_other(job_of: Callable[..., Job]) -> None:
    job = job_of(message_s=600.0)
    slow, busy = job.link(1), job.link(2)
    send_all(slow, REQUEST.encode(StoreRequest(1, "set", ["a"], [b""]))[:1], time.monotonic() + 5)
    began = time.monotonic()
    for number in range(20):
        assert ask(busy, "add", "n", amount=1).value == number + 1
    assert time.monotonic() - began < PATIENCE_S
    job.store.set("mine", b"1")
    assert ask(busy, "get", "mine").value == b"1"


def test_a_request_that_is_never_complete_ends_its_link(job_of: Callable[..., Job]) -> None:
    job = job_of(message_s=0.5)
    slow = job.link(1)
    send_all(slow, b"\1", time.monotonic() + 5)
    with pytest.raises(LinkError):
        receive(slow, ANSWER, time.monotonic() + PATIENCE_S)


def test_a_rank_that_reads_no_answer_holds_up_no_other(job_of: Callable[..., Job]) -> None:
    job = job_of(message_s=600.0)
    job.store.set("large", bytes(12 << 20))
    deaf, busy = job.link(1), job.link(2)
    for number in range(4):  # more than the sockets hold
        request = StoreRequest(number, "get", ["large"], [])
        send_all(deaf, REQUEST.encode(request), time.monotonic() + PATIENCE_S)
    for number in range(20):
        assert ask(busy, "add", "n", amount=1).value == number + 1
    for number in range(4):  # all of it is there once it reads
        answer = receive(deaf, ANSWER, time.monotonic() + PATIENCE_S)
        assert (answer.number, answer.value) == (number, bytes(12 << 20))


def test_a_store_that_is_full_says_so_and_goes_on(job_of: Callable[..., Job]) -> None:
    job = job_of(max_bytes=4 * (KEY_OVERHEAD + 100))
    link = job.link(1)
    answers = [ask(link, "set", f"key {number}", value=bytes(90)) for number in range(5)]
    assert [bool(answer.error) for answer in answers] == [False] * 4 + [True]
    assert "the store is full: with this value of 90 bytes its 4 keys" in answers[-1].error
    with pytest.raises(dist.DistStoreError, match=r"set of mine: the store is full.*by a coll"):
        job.store.set("mine", bytes(90))
    assert ask(link, "set", "key 0", value=bytes(91)).error == "", "in place of the value before"
    assert job.store.delete_key("key 0")
    job.store.set("mine", bytes(90))
    assert job.store.num_keys() == 4


def test_many_small_keys_are_bounded_as_well(job_of: Callable[..., Job]) -> None:
    job = job_of(max_bytes=100 * KEY_OVERHEAD)
    link = job.link(1)
    errors = [ask(link, "add", f"{number}", amount=1).error for number in range(120)]
    assert 90 < errors.index(next(filter(None, errors))) < 100
    assert job.store.num_keys() < 100


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x84\xa6number\1\xa4what\xa4wait\xa4keys\xdd\x00\xf0\x00\x00\xa6values\x90",
        msgspec.msgpack.encode({"number": 1, "what": "wait", "keys": ["k"] * 70_000, "values": []}),
    ],
    ids=["no msgpack", "announces 15 million keys", "70,000 keys"],
)
def test_a_request_that_is_none_ends_its_link_and_no_other(
    job_of: Callable[..., Job], body: bytes
) -> None:
    job = job_of()
    bad, good = job.link(1), job.link(2)
    send_all(bad, len(body).to_bytes(4, "little") + body, time.monotonic() + PATIENCE_S)
    with pytest.raises(LinkError):
        receive(bad, ANSWER, time.monotonic() + PATIENCE_S)
    assert ask(good, "count").value == 0


@pytest.mark.parametrize(
    ("what", "keys", "error"),
    [
        ("add", ["text"], "invalid literal for int"),
        ("get", [], "get needs a key or a value that was not given"),
        ("set", ["text"], "set needs a key or a value that was not given"),
        ("drop all", ["text"], "a store has no operation 'drop all'"),
    ],
)
def test_a_request_that_can_not_be_done_is_answered_with_the_reason(
    job_of: Callable[..., Job], what: str, keys: list[str], error: str
) -> None:
    job = job_of()
    job.store.set("text", b"abc")
    link = job.link(1)
    assert error in ask(link, what, *keys).error
    assert ask(link, "get", "text").value == b"abc"


def test_a_rank_asks_no_other_node_than_that_of_rank_0(job_of: Callable[..., Job]) -> None:
    job = job_of()
    members = (replace(job.group.members[0], node=STRANGER.node_id), *job.group.members[1:])
    group = replace(job.group, rank=1, members=members)
    switchboard = Switchboard(Listener("127.0.0.1", 0, NODES[1]), NODES[1], wait_s=5.0)
    try:
        with pytest.raises(
            LinkError, match=r"rank 0 .* should be on node .*, but node .* answered"
        ):
            StoreClient(group, switchboard, PATIENCE_S)
    finally:
        switchboard.close()


def test_a_rank_and_rank_0_share_the_values(job_of: Callable[..., Job]) -> None:
    job = job_of()
    switchboard = Switchboard(Listener("127.0.0.1", 0, NODES[1]), NODES[1], wait_s=5.0)
    client = StoreClient(replace(job.group, rank=1), switchboard, PATIENCE_S)
    theirs = LinkStore(client, PATIENCE_S)
    try:
        theirs.set("key", "value")
        job.store.wait(["key"], timedelta(seconds=PATIENCE_S))
        assert job.store.compare_set("key", "value", "new") == b"new"
        assert theirs.get("key") == b"new"
        assert theirs.check(["key"])
        with pytest.raises(dist.DistStoreError, match="add of key: invalid literal"):
            theirs.add("key", 1)
    finally:
        client.close()
        switchboard.close()
