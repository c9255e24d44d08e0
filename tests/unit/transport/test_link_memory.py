"""Memory shared by two processes: what is accepted, what is not, and what is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from potluck._core.transport import link_memory
from potluck._core.transport.link_memory import (
    OfferedLinkMemory,
    map_link_memory,
    offer_link_memory,
)
from potluck._core.transport.listener import Admission, Listener
from potluck._core.transport.tcp import TcpLink
from potluck._core.wire.greeting import Welcome
from potluck.errors import LinkError, ProtocolError
from support.links import Blocking, new_credentials, psk, tls_pair

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"),
    reason="link memory needs memfd (Linux); links work without them",
)


@pytest.fixture
def offered() -> Iterator[OfferedLinkMemory]:
    """An offer that the peer declines in the end."""
    offered = offer_link_memory(2, PAGE)
    assert offered is not None
    yield offered
    offered.settle(False)


def test_an_offer_that_is_true_is_mapped(offered: OfferedLinkMemory) -> None:
    memory = map_link_memory(offered.offer)
    assert memory is not None
    assert (memory.num_slots, memory.slot_bytes) == (2, PAGE)
    memory.close()


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "another host's"},
        {"boot": ""},
        {"pid": 2**22 + 1},
        {"fd": 100_000},
        {"fd": 0},
        {"token": bytes(32)},
        {"token": b""},
        {"num_slots": 3},
        {"num_slots": 1},
        {"num_slots": 0},
        {"num_slots": 10**12},
        {"num_slots": -2, "slot_bytes": -PAGE},
        {"slot_bytes": 2 * PAGE},
        {"slot_bytes": PAGE - 1},
        {"slot_bytes": 0},
    ],
    ids=str,
)
def test_an_offer_that_is_not_true_gives_a_link_without_a_shared_memory(
    offered: OfferedLinkMemory, change: dict[str, object]
) -> None:
    assert map_link_memory(msgspec.structs.replace(offered.offer, **change)) is None


def test_memory_beyond_the_limit_is_neither_made_nor_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gibibyte and a page, which take memory only where they are touched."""
    with pytest.raises(ValueError, match="at most 1073741824 are allowed"):
        offer_link_memory(1, 1 << 29)
    with monkeypatch.context() as unbounded:
        unbounded.setattr(link_memory, "MAX_LINK_MEMORY_BYTES", 1 << 62)
        larger = offer_link_memory(1, 1 << 29)
        assert larger is not None
        memory = map_link_memory(larger.offer)
        assert memory is not None, "but for the limit"
        memory.close()
    assert map_link_memory(larger.offer) is None
    larger.settle(False)


def test_no_file_of_another_process_is_opened(offered: OfferedLinkMemory) -> None:
    reader, writer = os.pipe()  # opening a pipe for both would keep its reader from its end
    try:
        assert map_link_memory(msgspec.structs.replace(offered.offer, fd=reader)) is None
    finally:
        os.close(reader)
        os.close(writer)


def test_memory_that_could_be_cut_short_under_our_feet_is_not_mapped() -> None:
    """A peer that shrinks a mapped file kills with SIGBUS: only sealed files are taken."""
    whole = offer_link_memory(2, PAGE)
    assert whole is not None
    fd = os.memfd_create("potluck-shm", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE + 4 * PAGE)
        with mmap.mmap(fd, 0) as copy, mmap.mmap(whole._fd, 0) as original:
            copy[:] = original[:]
        offer = msgspec.structs.replace(whole.offer, fd=fd)
        assert map_link_memory(offer) is None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert map_link_memory(offer) is None, "a seal that can be followed by others is no promise"
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        memory = map_link_memory(offer)
        assert memory is not None
        memory.close()
    finally:
        os.close(fd)
        whole.settle(False)


def test_memory_that_was_offered_can_not_be_resized_by_anybody(offered: OfferedLinkMemory) -> None:
    fd = os.open(f"/proc/self/fd/{offered.offer.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_a_system_without_descriptors_to_spare_gives_a_link_without_a_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = os.memfd_create

    def full(name: str, *flags: int) -> int:
        if name == "potluck-shm":
            raise OSError(24, "Too many open files")
        return make(name, *flags)

    monkeypatch.setattr(os, "memfd_create", full)
    assert offer_link_memory() is None
    with tls_pair() as (near, far):
        assert near.memory is None
        assert far.memory is None


def test_a_server_that_uses_no_shared_memory_says_so_and_both_ends_have_none() -> None:
    with tls_pair(use_shared_memory=False) as (near, far):
        assert near.memory is None
        assert far.memory is None


def test_a_slot_that_does_not_exist_is_the_peers_mistake() -> None:
    with tls_pair(memory=(2, PAGE)) as (near, _):
        assert near.memory is not None
        for slot in (-1, 2, 1 << 40):
            with pytest.raises(ProtocolError, match="there are 2"):
                near.memory.incoming(slot)


def test_a_closed_shared_memory_gives_no_slots_and_can_be_closed_again() -> None:
    with tls_pair() as (near, _):
        memory = near.memory
        assert memory is not None
        memory.close()
        memory.close()
        with pytest.raises(LinkError, match="closed"):
            memory.outgoing(0)


def test_an_array_over_a_slot_outlives_the_shared_memory() -> None:
    with tls_pair(memory=(1, PAGE)) as (near, far):
        assert near.memory is not None
        assert far.memory is not None
        array = np.frombuffer(far.memory.incoming(0), dtype=np.float32)
        np.frombuffer(near.memory.outgoing(0), dtype=np.float32)[:] = 1.5
        near.close()
        far.close()
    assert array.sum() == 1.5 * PAGE / 4


def test_links_keep_no_descriptor_but_their_socket_and_their_memory() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    with tls_pair():
        assert count() - before <= 4
    assert count() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_another_user_of_the_machine_can_not_open_it(offered: OfferedLinkMemory) -> None:
    path = f"/proc/{offered.offer.pid}/fd/{offered.offer.fd}"
    mine = subprocess.run(["/bin/cat", path], capture_output=True, timeout=30)
    assert offered.offer.token in mine.stdout, "who may open it can read it"
    other = subprocess.run(["/bin/cat", path], capture_output=True, timeout=30, user=65534)
    assert other.returncode != 0
    assert b"Permission denied" in other.stderr


CHILD = """
import os, signal, sys, time
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from potluck._core.transport.credentials import Credentials, era_of
from potluck._core.transport.handshake import connect
from potluck._core.wire.greeting import Hello

era = era_of(bytes.fromhex(sys.argv[2]))
mine = Credentials(Ed25519PrivateKey.generate(), lambda: (era,))
link, _ = connect(
    "127.0.0.1", int(sys.argv[1]), Hello("data"), mine,
    deadline=time.monotonic() + 60,
)
link.memory.outgoing(0)[:5] = b"hello"
link.send(memoryview(b"x"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def mapped() -> int:
    """How many pieces of shared memory this process holds."""
    with open("/proc/self/maps") as maps:
        return maps.read().count("potluck-shm")


def test_a_killed_process_leaves_its_words_and_no_memory_behind() -> None:
    gc.collect()  # earlier tests' memory may be in cycles
    before = mapped()
    links: queue.Queue[TcpLink] = queue.Queue()
    with contextlib.closing(Listener("127.0.0.1", 0, new_credentials())) as listener:
        listener.serve(lambda hello, node: Admission(Welcome(), links.put))
        command = [sys.executable, "-c", CHILD, str(listener.port), psk().hex()]
        with subprocess.Popen(command) as child, contextlib.closing(links.get(timeout=60)) as link:
            end = Blocking(link)
            assert end.receive(1) == b"x"
            assert child.wait(60) == -signal.SIGKILL
            with pytest.raises(LinkError):
                end.receive(1)
            assert link.memory is not None
            assert bytes(link.memory.incoming(0)[:5]) == b"hello"
            assert mapped() > before
    assert mapped() == before
