"""One server and clients that talk to it over pairs of sockets: many, silent, hostile."""

from __future__ import annotations

import contextlib
import random
import resource
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from potluck._core.backends.service_transport import Caller
from potluck._core.system import wait_ready
from potluck._core.transport.bulk import BulkLink, socket_pair
from potluck._core.wire.payload import Packed, pack
from potluck._core.wire.services import Reply, Request, encode
from potluck.errors import LinkError, ServiceLost
from potluck.services import Call, service
from potluck.services import poller as polling
from potluck.services import server as server_module
from potluck.services.channel import Blocks, Channel, State
from potluck.services.client import Connection, Remote
from potluck.services.definition import services_of
from potluck.services.poller import Poller, poller
from potluck.services.server import CLOSE_S, NUM_THREADS, Budget, Server

MIB = 1 << 20
LATE_S = 20.0


def eventually(check: Callable[[], bool], what: str) -> None:
    deadline, tick = time.monotonic() + LATE_S, threading.Event()
    while not check():
        assert time.monotonic() < deadline, what
        tick.wait(0.01)


class Offer:
    """A server with one service, and its clients."""

    def __init__(self, *things: Any, max_bytes: int = 64 * MIB, **options: Any) -> None:
        self.server = Server(
            rank_of=lambda worker: int(worker), max_bytes=max_bytes, memory=Blocks(0), **options
        )
        self.server.add(services_of(*things))
        self.links: list[BulkLink] = []

    def link(self, worker: str = "1") -> BulkLink:
        mine, theirs = socket_pair("client", f"client {worker}")
        self.server.take(theirs, Caller("node", worker, "job"))
        self.links.append(mine)
        return mine

    def client(self, worker: str = "1") -> Connection:
        return Connection(self.link(worker), 1 << 30, Blocks(0))

    @property
    def num_clients(self) -> int:
        return len(self.server._clients)


@contextlib.contextmanager
def offering(*things: Any, **options: Any) -> Iterator[Offer]:
    offer = Offer(*things, **options)
    try:
        yield offer
    finally:
        for link in offer.links:
            link.close()
        offer.server.close()


def call(client: Connection, method: str, *args: Any, to: str = "s") -> Any:
    failure, value = client.call(Request(to, method, 20.0), arguments(*args), soon())
    assert failure is None, failure
    return value


def soon() -> float:
    return time.monotonic() + LATE_S


def arguments(*args: Any) -> Packed:
    return pack(dict(enumerate(args)), "arguments")


@service("s", concurrent=True)
def rank(call: Call) -> int:
    return call.rank


def test_a_quick_client_without_end_leaves_the_only_thread_to_others_and_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "_HAS_OTHERS", True)
    monkeypatch.setattr(polling, "_QUICK_S", LATE_S)
    monkeypatch.setattr(polling, "LONGEST_S", LATE_S)
    is_over = threading.Event()
    with offering(rank, num_threads=1) as offer:
        quick, other = offer.client("1"), offer.client("2")

        def call_without_end() -> None:
            with contextlib.suppress(LinkError):
                while not is_over.is_set():
                    call(quick, "rank")

        thread = threading.Thread(target=call_without_end)
        thread.start()
        for _ in range(3):
            assert call(other, "rank") == 2
        began = time.monotonic()
        offer.server.close()
        assert time.monotonic() - began < CLOSE_S
        is_over.set()
        thread.join(LATE_S)
        assert not thread.is_alive()


def test_before_a_method_a_caller_may_be_refused() -> None:
    def only_two(call: Call) -> None:
        if call.worker != "2":
            raise PermissionError(f"worker {call.worker} may not call {call.method}")

    @service("s", before=only_two)
    def secret(call: Call) -> str:
        return f"for {call.worker}"

    with offering(secret) as offer:
        assert call(offer.client("2"), "secret") == "for 2"
        failure, value = offer.client("1").call(Request("s", "secret", 20.0), arguments(), soon())
        assert failure is not None
        assert (failure.type, failure.text) == ("PermissionError", "worker 1 may not call secret")
        assert value is None


def test_a_reply_of_other_bytes_is_the_loss_of_the_service() -> None:
    mine, theirs = socket_pair("client", "server")
    theirs.send(memoryview(b"\xff" * 64))
    remote = Remote(
        "s", "worker 1", lambda deadline: mine, timeout_s=20.0, max_bytes=1, memory=Blocks(0)
    )
    with pytest.raises(ServiceLost, match="was cut off, and may have run"):
        remote.method()
    theirs.close()


def test_a_banned_node_loses_its_connections_and_others_keep_theirs() -> None:
    banned: set[str] = set()

    def objects_to(node: str) -> str | None:
        return "it is banned" if node in banned else None

    with offering(rank, objects_to=objects_to) as offer:
        mine, theirs = socket_pair("client", "client 2")
        offer.server.take(theirs, Caller("thief", "2", "job"))
        offer.links.append(mine)
        stolen, honest = Connection(mine, 1 << 30, Blocks(0)), offer.client("1")
        assert call(stolen, "rank") == 2
        banned.add("thief")
        eventually(lambda: offer.num_clients == 1, "the connection of a banned node is open")
        with pytest.raises(LinkError):
            call(stolen, "rank")
        assert call(honest, "rank") == 1


def test_a_banned_nodes_calls_that_are_under_way_get_no_reply() -> None:
    banned, secret = threading.Event(), Future[str]()

    @service("s", concurrent=True)
    def wait(call: Call) -> Any:
        return secret

    def objects_to(node: str) -> str | None:
        return "it is banned" if banned.is_set() else None

    with offering(wait, objects_to=objects_to) as offer:
        client = offer.client("1")
        ends: list[BaseException] = []

        def ask() -> None:
            try:
                call(client, "wait")
            except LinkError as error:
                ends.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: bool(secret._done_callbacks), "the call did not begin")
        banned.set()
        secret.set_result("the parameters")
        thread.join(LATE_S)
        assert len(ends) == 1


def test_a_sweep_leaves_a_connection_that_a_thread_has() -> None:
    banned: set[str] = set()

    def objects_to(node: str) -> str | None:
        return "it is banned" if node in banned else None

    server = Server(
        rank_of=int, max_bytes=MIB, memory=Blocks(0), num_threads=0, objects_to=objects_to
    )
    mine, theirs = socket_pair("client", "client 2")
    server.take(theirs, Caller("thief", "2", "job"))
    mine.send(memoryview(b"\0"))
    client = server._next()
    assert client is not None
    banned.add("thief")
    server._sweep()
    assert server._clients == {client}
    server._park(client)
    server._sweep()
    assert not server._clients
    mine.close()
    server._poller.close()  # ``close`` does it when there are threads


def test_a_method_that_blocks_delays_no_other_service() -> None:
    entered, gate = threading.Event(), threading.Event()

    @service("slow")
    def block(call: Call) -> int:
        entered.set()
        assert gate.wait(LATE_S)
        return call.rank

    with offering(rank, block, num_threads=2) as offer:
        first = threading.Thread(target=lambda: call(offer.client(), "block", to="slow"))
        first.start()
        assert entered.wait(LATE_S)
        assert [call(offer.client(str(number)), "rank") for number in range(20)] == list(range(20))
        gate.set()
        first.join(LATE_S)
        assert not first.is_alive()


@pytest.mark.parametrize("num_clients", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_many_clients_are_served_by_eight_threads(num_clients: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with offering(rank) as offer:
        before = threading.active_count()
        clients = [offer.client(str(number)) for number in range(num_clients)]
        for _ in range(2):
            assert [call(each, "rank") for each in clients] == list(range(num_clients))
        assert threading.active_count() == before
        assert offer.num_clients == num_clients


def test_a_call_at_once_for_each_thread_and_more_wait_their_turn() -> None:
    inside, most = [0], [0]
    gate, lock = threading.Event(), threading.Lock()

    @service("s", concurrent=True)
    def work(call: Call) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if inside[0] == 2:
                gate.set()
        assert gate.wait(20)
        with lock:
            inside[0] -= 1
        return call.rank

    with offering(work, num_threads=2) as offer:
        results: list[int] = []
        clients = [offer.client(str(number)) for number in range(6)]
        threads = [
            threading.Thread(target=lambda each=each: results.append(call(each, "work")))
            for each in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(results) == list(range(6))
        assert most[0] == 2


def test_readers_that_stop_bound_the_servers_memory_and_are_dropped() -> None:
    """Replies of 8 MiB for 12 clients that never read, with room for 32 MiB in all."""
    alive, most = [0], [0]
    counting = threading.RLock()

    def ended() -> None:
        with counting:
            alive[0] -= 1

    @service("s", concurrent=True)
    def pull(call: Call) -> Any:
        array = np.ones(8 * MIB, np.uint8)
        weakref.finalize(array, ended)
        with counting:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
        return array

    with offering(pull, rank, max_bytes=32 * MIB, num_threads=2, stall_s=1.0) as offer:
        for _ in range(12):
            link = offer.link()
            packed = arguments()
            link.send(memoryview(encode(Request("s", "pull", 20.0), packed)))
        reader = offer.client("7")
        assert call(reader, "rank") == 7  # when those before it were dropped, if there were many
        assert len(call(reader, "pull")) == 8 * MIB
        # Four fit. Each of the two threads may have made one more before it was counted, and four
        # that were given up may not have been freed yet. Without a bound there would be 13.
        assert most[0] <= 4 + 2 + 4
        eventually(lambda: offer.num_clients == 1, "all clients but the reader to be dropped")


def test_a_request_that_stops_halfway_costs_no_thread_and_is_dropped() -> None:
    with offering(rank, num_threads=1, stall_s=1.0) as offer:
        request = encode(Request("s", "rank", 20.0), arguments(np.ones(MIB)))
        for _ in range(5):
            offer.link().send(memoryview(request[:-3]))
        assert call(offer.client("4"), "rank") == 4
        eventually(lambda: offer.num_clients == 1, "the five to be dropped")


def test_a_long_request_that_stops_keeps_no_small_one_waiting() -> None:
    with offering(rank, max_bytes=MIB) as offer:
        announced = encode(Request("s", "rank", 20.0), arguments(np.ones(MIB, np.uint8)))
        offer.link().send(memoryview(announced))  # its array never comes
        eventually(lambda: offer.server._budget._requests > MIB, "the long request to be charged")
        client = offer.client("2")
        assert [call(client, "rank") for _ in range(5)] == [2] * 5
        assert offer.num_clients == 2, "the long request still waits for its bytes"


def test_a_reply_is_charged_with_its_header() -> None:
    @service("s")
    def texts(call: Call) -> Any:
        return "x" * (4 * MIB)

    with offering(texts) as offer:
        request = encode(Request("s", "texts", 20.0), arguments())
        offer.link().send(memoryview(request))  # and reads nothing
        eventually(lambda: offer.server._budget._replies > 4 * MIB, "the reply to be charged")


def test_a_list_of_bans_that_cannot_be_read_costs_connections_and_no_thread() -> None:
    broken = threading.Event()

    def objects_to(node: str) -> str | None:
        if broken.is_set():
            raise OSError("the disk is gone")
        return None

    with offering(rank, num_threads=1, objects_to=objects_to) as offer:
        assert call(offer.client("3"), "rank") == 3
        broken.set()
        eventually(lambda: not offer.num_clients, "the connection to be dropped")
        broken.clear()
        assert call(offer.client("4"), "rank") == 4


def test_a_request_that_trickles_leaves_the_thread_to_others() -> None:
    with offering(rank, num_threads=1) as offer:
        link, is_over, begun = offer.link(), threading.Event(), threading.Event()
        request = encode(Request("s", "rank", 20.0), arguments(np.ones(MIB))) + bytes(MIB)

        def trickle() -> None:
            for number, byte in enumerate(request):
                if is_over.wait(0.001):
                    return
                link.send(memoryview(bytes([byte])))
                if number == 20:
                    begun.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert begun.wait(LATE_S)
            assert [call(offer.client("4"), "rank") for _ in range(5)] == [4] * 5
        finally:
            is_over.set()
            thread.join()


class Watched(Blocks):
    """Memory that tells whether its arrays are still in use."""

    def __init__(self) -> None:
        super().__init__(0)
        self.taken: list[weakref.ref[Any]] = []

    def take(self, nbytes: int) -> Any:
        array = super().take(nbytes)
        self.taken.append(weakref.ref(array))
        return array


@pytest.mark.parametrize("method", ["size", "missing"])
def test_an_idle_connection_keeps_no_array_of_the_call_before(method: str) -> None:
    @service("s")
    def size(call: Call, array: Any) -> int:
        return int(array.size)

    memory = Watched()
    with offering(size) as offer:
        offer.server.memory = memory
        client = offer.client()
        client.call(Request("s", method, 20.0), arguments(np.zeros(100_000)), soon())
        assert len(memory.taken) == 1
        eventually(lambda: memory.taken[0]() is None, "the server keeps the array")


def send_all(link: BulkLink, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[link.send(left) :]
        assert wait_ready(link.fileno(), write=True, timeout_s=LATE_S)


@pytest.mark.parametrize("piece", [1, 15, 4095, 4096, 4097, 1 << 20])
def test_a_request_comes_in_pieces_of_any_size(piece: int) -> None:
    @service("s")
    def echo(call: Call, *parts: Any) -> Any:
        return parts

    empty = len(encode(Request("s", "echo", 20.0), arguments(np.empty(0, np.uint8))))
    with offering(echo, num_threads=1) as offer:
        link = offer.link()
        channel = Channel(link, Reply, MIB, Blocks(0))
        for size in (0, 1, 4095 - empty, 4096 - empty, 4097 - empty, 4096, 9000):
            sent = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            packed = arguments(sent, np.empty(0), "text")
            frame = encode(Request("s", "echo", 20.0), packed) + b"".join(packed.buffers)
            for at in range(0, len(frame), piece):
                send_all(link, frame[at : at + piece])
            eventually(lambda: channel.receive() is State.COMPLETE, "an answer")
            assert channel.head.failure is None
            received, nothing, text = channel.value
            assert received.tobytes() == sent.tobytes()
            assert (nothing.size, text) == (0, "text")


def lengths(head: int, header: int, arrays: int) -> bytes:
    return struct.pack("<IIQ", head, header, arrays)


def equal_hashes(count: int) -> bytes:
    """A header of a dict whose ``count`` keys are arrays of -1 and -2, which have equal hashes as
    tuples: decoded, 38,000 keys stopped all threads of a process for 4.7 s."""
    keys = (bytes(0xFF if n >> bit & 1 else 0xFE for bit in range(15)) for n in range(count))
    return b"\xdf" + struct.pack(">I", count) + b"".join(b"\x9f" + key + b"\xc0" for key in keys)


HOSTILE: dict[str, bytes] = {
    "equal hashes": encode(Request("s", "rank", 1.0), Packed(equal_hashes(26_000), [], 0)),
    "4 GiB": lengths(10, 10, 4 << 30),
    "long header": lengths(10, 1 << 31, 0),
    "long head": lengths(1 << 31, 0, 0),
    "no head": lengths(0, 0, 0),
    "noise": random.Random(1).randbytes(4096),
    "a reply": lengths(1, 1, 0) + b"\x80\xc0",
    "no arguments": encode(Request("s", "rank", 1.0), Packed(b"\xc0", [], 0)),
    "fewer arrays": encode(Request("s", "rank", 1.0), Packed(b"\x80", [], 8)) + bytes(8),
    "two requests": 2 * encode(Request("s", "rank", 1.0), Packed(b"\x80", [], 0)),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_what_is_no_call_ends_that_connection_only(said: str) -> None:
    with offering(rank, num_threads=1) as offer:
        other = offer.client("3")
        link = offer.link()
        send_all(link, HOSTILE[said])
        if said == "no arguments":  # well formed, but the method can't be called so
            channel = Channel(link, Reply, MIB, Blocks(0))
            eventually(lambda: channel.receive() is State.COMPLETE, "an answer")
            assert channel.head.failure is not None
        else:
            eventually(lambda: ended(link), "the end of the connection")
        assert call(other, "rank") == 3


def ended(link: BulkLink) -> bool:
    try:
        link.recv_into(memoryview(bytearray(16)))
    except LinkError:
        return True
    return False


def test_no_more_clients_than_agreed_and_of_one_node_half_of_them() -> None:
    caller, other = Caller("node", "1", "job"), Caller("another node", "1", "job")
    with offering(rank, max_clients=4) as offer:
        assert offer.server.objection(caller) is None
        clients = [offer.client(), offer.client()]
        assert [call(each, "rank") for each in clients] == [1, 1]
        assert "2 clients of this node are connected" in str(offer.server.objection(caller))
        assert offer.server.objection(other) is None
        clients += [offer.client(), offer.client()]
        assert "4 clients are connected" in str(offer.server.objection(other))


def test_a_long_header_is_charged_with_what_it_may_decode_to() -> None:
    """A header of empty maps takes 72 times its bytes when it is decoded."""
    maps = {f"{n}": [{}] * 1000 for n in range(20)}
    with offering(rank) as offer:
        client, server = offer.link(), offer.server
        frame = encode(Request("s", "rank", 20.0), pack(maps, "arguments"))
        client.send(memoryview(frame)[:-1])
        client.flush()
        eventually(lambda: server._budget._requests > 72 * 20_000, "the request to be charged")


def test_a_budget_lets_requests_in_by_order() -> None:
    budget: Budget[str] = Budget(10)
    assert budget.enter("a", 8)
    assert not budget.enter("b", 8)
    assert not budget.enter("c", 1)  # it would fit, and must not overtake b for ever
    assert budget.leave("a") == ["b", "c"]
    assert budget.leave("b") == []
    assert budget.enter("d", 99) is False
    assert budget.leave("c") == ["d"]  # one request alone always fits
    assert not budget.enter("e", 1)
    assert budget.leave("e") == []
    assert budget.leave("d") == []


def test_small_requests_wait_for_replies_only() -> None:
    budget: Budget[str] = Budget(10)
    assert budget.enter("a", 10)
    assert not budget.is_full
    assert not budget.enter("b", 10)
    budget.add("a", 10)
    assert budget.is_full
    assert not budget.enter_small("c")
    assert not budget.enter_small("d")
    assert budget.leave("c") == []  # it was dropped while it waited
    assert budget.leave("a") == ["b", "d"]
    assert budget.enter_small("e")


def test_a_failure_of_the_poller_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: set[int] = set()

    def flaky() -> Poller:
        made = poller()
        wait = made.wait

        def fails_first(timeout_s: float) -> int | None:
            if (me := threading.get_ident()) not in failed:
                failed.add(me)
                raise OSError("out of memory")
            return wait(timeout_s)

        monkeypatch.setattr(made, "wait", fails_first)
        return made

    monkeypatch.setattr(server_module, "poller", flaky)
    with offering(rank) as offer:
        eventually(lambda: len(failed) == NUM_THREADS, "not every thread has seen the failure")
        assert call(offer.client("3"), "rank") == 3


def test_a_client_that_the_poller_refuses_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, *, write: bool) -> None:
        raise OSError("too many descriptors are watched")

    with offering(rank) as offer:
        with monkeypatch.context() as patch:
            patch.setattr(offer.server._poller, "watch", refuse)
            mine, theirs = socket_pair("client", "refused")
            offer.links.append(mine)
            with pytest.raises(OSError, match="too many"):
                offer.server.take(theirs, Caller("node", "1", "job"))
        assert offer.num_clients == 0
        assert not offer.server._parked
        assert wait_ready(mine.fileno(), write=False, timeout_s=LATE_S)
        with pytest.raises(LinkError):
            mine.recv_into(memoryview(bytearray(1)))
        assert call(offer.client("2"), "rank") == 2
