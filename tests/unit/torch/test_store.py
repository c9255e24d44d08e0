"""The store of a ``potluck://`` world: its values on rank 0, and what ranks wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from potluck._core.backends.service_transport import TcpServiceTransport
from potluck._core.engine.mesh import Switchboard
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.listener import Listener
from potluck._core.types import Group, Member
from potluck.errors import PotluckError, ServiceLost
from potluck.services import Call, Services
from potluck.torch.process_group import store as module
from potluck.torch.process_group.store import KEY_OVERHEAD, MAX_BYTES, KeyWaits, LinkStore
from support.links import new_credentials

EPOCH = 5
PATIENCE_S = 60.0
NODES = [new_credentials() for _ in range(3)]
STRANGER = new_credentials()


class Job:
    """Three ranks with links of their own, each on a node; rank 0 has the store."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._closed: list[Callable[[], None]] = []
        self._max_bytes = max_bytes
        self._switchboards = [self._switchboard(node) for node in NODES]
        self.members = tuple(
            Member(str(rank), node.node_id, "127.0.0.1", self._switchboards[rank].listener.port)
            for rank, node in enumerate(NODES)
        )
        self.stores = [self.store(rank) for rank in range(3)]

    def _switchboard(self, node: Credentials) -> Switchboard:
        switchboard = Switchboard(Listener("127.0.0.1", 0, node), node, wait_s=5.0)
        self._closed.append(switchboard.close)
        return switchboard

    def store(
        self, rank: int, *, node: Credentials | None = None, timeout_s: float = PATIENCE_S,
        **fields: object,
    ) -> LinkStore:  # fmt: skip
        group = replace(Group(EPOCH, rank, self.members, job="j"), **fields)
        services = self.services(rank, group, node)
        return LinkStore(group, services, timeout_s, max_bytes=self._max_bytes)

    def services(self, rank: int, group: Group, node: Credentials | None = None) -> Services:
        switchboard = self._switchboard(node) if node else self._switchboards[rank]
        transport = TcpServiceTransport(switchboard)
        services = Services(transport, lambda: group, timeout_s=PATIENCE_S, max_bytes=1 << 30)
        self._closed.append(services.close)
        return services

    def end(self) -> None:
        for close in reversed(self._closed):
            close()


@pytest.fixture
def job_of() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**options: int) -> Job:
        jobs.append(Job(**options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"node": STRANGER}, "worker 1 is on node .*, not on"),
        ({"node": NODES[2]}, "worker 1 is on node .*, not on"),
        ({"job": "another"}, "in job 'j', not 'another'"),
        ({"epoch": EPOCH - 1}, "no service 'torch-store-4'; there are: 'torch-store-5'"),
    ],
)
def test_a_store_takes_the_ranks_of_its_world_only(
    job_of: Callable[..., Job], fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(dist.DistStoreError, match=reason):
        job_of().store(1, **fields).set("key", "value")


def test_a_rank_asks_no_other_node_than_that_of_rank_0(job_of: Callable[..., Job]) -> None:
    job = job_of()
    job.members = (replace(job.members[0], node=STRANGER.node_id), *job.members[1:])
    with pytest.raises(
        dist.DistStoreError, match=r"should be on node .*, but node .* answered there"
    ):
        job.store(1).set("key", "value")


def test_all_ranks_share_the_values(job_of: Callable[..., Job]) -> None:
    zero, one, two = job_of().stores
    one.set("key", "value")
    zero.wait(["key"], timedelta(seconds=PATIENCE_S))
    assert zero.compare_set("key", "value", "new") == b"new"
    assert two.get("key") == b"new"
    assert two.check(["key"])
    assert not two.check(["key", "other"])
    assert [store.add("n", 2) for store in (zero, one, two)] == [2, 4, 6]
    assert [store.num_keys() for store in (zero, one, two)] == [2, 2, 2]
    assert one.delete_key("key")
    assert not zero.delete_key("key")
    two.set("text", "abc")
    for store in (zero, one):
        with pytest.raises(dist.DistStoreError, match="add of text: invalid literal"):
            store.add("text", 1)
    assert two.get("text") == b"abc"


@pytest.mark.parametrize("rank", [0, 1])
def test_compare_set_does_what_torchs_stores_do(job_of: Callable[..., Job], rank: int) -> None:
    ours, torchs = job_of().stores[rank], dist.HashStore()
    for store in (ours, torchs):
        store.set("there", "before")
    for key in ("there", "not there"):
        for expected in ("", "before", "other"):
            answers = {store.compare_set(key, expected, "after") for store in (ours, torchs)}
            assert len(answers) == 1, (key, expected, answers)
            assert ours.check([key]) == torchs.check([key])
            if ours.check([key]):
                assert ours.get(key) == torchs.get(key)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """One for each call of ``get`` at rank 0, of which a waiting rank makes 20 a second."""
    made = threading.Semaphore(0)
    get = module.Values.get

    def counted(self: module.Values, call: Call, key: str, wait_s: float) -> object:
        made.release()
        return get(self, call, key, wait_s)

    monkeypatch.setattr(module.Values, "get", counted)
    monkeypatch.setattr(module, "SLICE_S", 0.05)
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_waits_for_a_key_until_another_one_sets_it(
    job_of: Callable[..., Job], calls: threading.Semaphore, rank: int
) -> None:
    stores = job_of().stores
    seen: list[object] = []

    def wait() -> None:
        seen.append(stores[rank].get("key"))
        seen.append(stores[rank].wait(["key", "later"]))

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(3):
        assert calls.acquire(timeout=PATIENCE_S)
    assert not seen
    stores[2].set("key", "value")
    stores[2].set("later", "")
    thread.join(PATIENCE_S)
    assert seen == [b"value", None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_key_that_no_rank_sets_in_time_is_named(job_of: Callable[..., Job], rank: int) -> None:
    job = job_of()
    store = job.store(1, timeout_s=1.5) if rank else job.stores[0]
    store.set_timeout(timedelta(seconds=1.5))
    began = time.monotonic()
    with pytest.raises(
        dist.DistStoreError, match=r"get of key had no answer within 1.5 s: no rank has set it"
    ):
        store.get("key")
    assert time.monotonic() - began >= 1.5
    job.stores[2].set("b", "")
    with pytest.raises(dist.DistStoreError, match=r"wait of a, b had no answer within 0.5 s: no"):
        store.wait(["a", "b"], timedelta(seconds=0.5))


def test_one_rank_may_wait_for_many_keys_on_threads_at_once(job_of: Callable[..., Job]) -> None:
    _, one, two = job_of().stores
    values: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=lambda key: values.update({key: one.get(key)}), args=(str(number),))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for number in reversed(range(8)):
        two.set(str(number), f"value {number}")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert values == {str(number): f"value {number}".encode() for number in range(8)}


def test_a_store_that_has_ended_is_named_to_the_ranks_that_wait(
    job_of: Callable[..., Job], calls: threading.Semaphore
) -> None:
    job = job_of()
    one = job.stores[1]
    one.set("key", "value")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            one.get("never")
        except dist.DistStoreError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert calls.acquire(timeout=PATIENCE_S)
    job.end()
    thread.join(PATIENCE_S)
    [error] = errors
    assert "get of never had no answer within 60 s: torch-store-5.get() on worker 0" in str(error)
    assert isinstance(error.__cause__, ServiceLost)


def test_large_values_pass(job_of: Callable[..., Job]) -> None:
    zero, one, two = job_of().stores
    zero.set("large", bytes(12 << 20))
    two.set("larger", b"1" * (15 << 20))
    assert one.get("large") == bytes(12 << 20)
    assert one.get("larger") == b"1" * (15 << 20)


def test_a_store_that_is_full_says_so_and_goes_on(job_of: Callable[..., Job]) -> None:
    zero, one, _ = job_of(max_bytes=4 * (KEY_OVERHEAD + 100)).stores
    for number in range(4):
        one.set(f"key {number}", bytes(90))
    full = "the store is full: with this value of 90 bytes its 4 keys"
    with pytest.raises(dist.DistStoreError, match=f"set of key 4: {full}"):
        one.set("key 4", bytes(90))
    with pytest.raises(dist.DistStoreError, match=f"set of mine: {full}.*by a coll"):
        zero.set("mine", bytes(90))
    one.set("key 0", bytes(91))  # in place of the value before
    assert zero.delete_key("key 0")
    zero.set("mine", bytes(90))
    assert zero.num_keys() == 4


def test_many_small_keys_are_bounded_as_well(job_of: Callable[..., Job]) -> None:
    zero, one, _ = job_of(max_bytes=100 * KEY_OVERHEAD).stores
    for number in range(90):
        one.add(str(number), 1)
    with pytest.raises(dist.DistStoreError, match="the store is full"):
        [one.add(str(number), 1) for number in range(90, 100)]
    assert 90 <= zero.num_keys() < 100


@pytest.mark.parametrize(
    ("what", "arguments", "error"),
    [
        ("set", ["key", "text"], "a value of the store is bytes, not str"),
        ("set", ["key", np.zeros(3, np.uint8)], "a value of the store is bytes, not ndarray"),
        ("set", [5, b""], "object has no attribute 'encode'"),
        ("get", [], "missing 2 required positional arguments"),
        ("drop_all", ["text"], "has no method 'drop_all'"),
    ],
)
def test_calls_of_other_programs_than_a_store_do_no_harm(
    job_of: Callable[..., Job], what: str, arguments: list[object], error: str
) -> None:
    job = job_of()
    job.stores[0].set("text", b"abc")
    group = Group(EPOCH, 1, job.members, job="j")
    remote = job.services(1, group).remote(f"torch-store-{EPOCH}", "0")
    with pytest.raises(PotluckError, match=error):
        getattr(remote, what)(*arguments)
    assert job.stores[1].get("text") == b"abc"
    assert job.stores[0].num_keys() == 1


class Story:
    """Waits whose clock is moved; the lines that were written."""

    def __init__(self) -> None:
        self.now = 0.0
        self.values: set[str] = set()
        self.lines: list[str] = []
        self.waits = KeyWaits(
            self.values.__contains__, say=self.lines.append, clock=lambda: self.now
        )

    def wait(self, *waits: tuple[int, list[str]], until: float) -> None:
        """Ranks that call for keys each second, until a time."""
        while self.now < until:
            for rank, keys in waits:
                self.waits.note(rank, keys)
            self.now += 1.0
            self.waits.tick()


def test_ranks_that_wait_for_one_key_are_named_in_one_line() -> None:
    story = Story()
    waits = [(rank, ["weights"]) for rank in (3, 1, 2)]
    story.wait(*waits, until=3.0)
    assert story.lines == [
        "no rank has set the key 'weights' in the store, which rank 1 to 3 asked for; has every "
        "rank reached the line that sets it? (3 s so far)"
    ]
    story.wait(*waits, until=12.0)
    assert len(story.lines) == 1
    story.wait(*waits, until=13.0)
    assert len(story.lines) == 2


def test_of_several_keys_one_that_is_not_set_is_named() -> None:
    story = Story()
    story.values.add("a")
    story.wait((0, ["a", "b", "c"]), until=3.0)
    assert "the key 'b' (and 1 more) in the store, which rank 0 asked for" in story.lines[0]


def test_many_short_waits_say_nothing() -> None:
    story = Story()
    for second in range(20):
        key = f"key {second}"
        story.wait((second % 2, [key]), until=second + 1.0)
        story.values.add(key)
    assert story.lines == []


def test_a_rank_that_calls_no_more_is_named_no_more() -> None:
    story = Story()
    story.wait((1, ["weights"]), until=2.0)
    story.wait(until=6.0)
    assert story.lines == []
    story.wait((2, ["weights"]), until=9.0)
    assert ["which rank 2 asked for" in line for line in story.lines] == [True]
    assert "(3 s so far)" in story.lines[0]
