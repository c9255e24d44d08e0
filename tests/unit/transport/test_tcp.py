"""A link under TLS by Python's ``ssl``, which can't change its key."""

from __future__ import annotations

import gc
import select
import socket
import struct

import pytest

from potluck._core.transport import tcp
from potluck.errors import LinkError
from support.links import Blocking, new_credentials, tls_pair

BOUND = 1_000_000


@pytest.mark.parametrize("size", [48, 60_000])
def test_a_key_encrypts_no_more_than_it_may(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "BYTES_PER_KEY", BOUND)
    sent = 0
    with tls_pair(memory=None) as (mine, theirs):
        here, there = Blocking(mine), Blocking(theirs)
        text = ""
        while not text:
            try:
                here.send_all(bytes(size))
            except LinkError as error:
                text = str(error)
            else:
                there.receive(size)
                sent += size
        assert "as much as AES-GCM allows" in text
        assert "potluck doctor" in text
        assert BOUND // 4 < sent <= BOUND
        with pytest.raises(LinkError, match="as much as AES-GCM allows"):
            mine.send(memoryview(b"more"))
        there.send_all(b"the other direction has a key of its own")
        assert here.receive(9) == b"the other"


def test_the_bound_is_that_of_the_rfc() -> None:
    assert 2**24.5 * 16 * 1024 >= tcp.BYTES_PER_KEY == 256 << 30


def test_a_connection_that_its_peer_resets_before_tls_is_closed(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        poller = select.poll()
        poller.register(mine, 0)
        assert poller.poll(30_000)  # the reset has arrived
        with mine, pytest.raises(ConnectionResetError, match="not connected"):
            tcp.secured(mine, new_credentials(use_native=False), server_side=False)
    gc.collect()
    assert [str(each.message) for each in recwarn if each.category is ResourceWarning] == []
