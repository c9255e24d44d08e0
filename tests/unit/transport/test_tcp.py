"""A link under TLS by Python's ``ssl``, which can't change its key."""

from __future__ import annotations

import pytest

from potluck._core.transport import tcp
from potluck.errors import LinkError
from support.links import Blocking, tls_pair

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
