"""The knock: before TLS begins, both sides prove that they hold the cluster's secret. Pure.

A server answers nothing to a connection that does not begin with a knock, so strangers and
scanners get no byte: no certificate, no TLS alert, no name.

    caller -> server   80 bytes: a random nonce, and eight tags of it (one for each era that the
                       caller knows; the others are random)
    server -> caller   32 bytes: a random nonce, and a tag of both nonces under the first key of the
                       server's that one of the eight tags was made with
    caller -> server   16 bytes: a tag of both nonces

Each tag is a truncated HMAC-SHA-256. All bytes look random to those who don't have the key. A knock
that was recorded and is played again gets the 32 random bytes and no more, since the nonce of the
server is new each time. This is no key exchange: TLS follows, with keys of its own.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from potluck._core.transport.credentials import Era
from potluck.errors import ProtocolError, WrongSecret

MAX_ERAS = 8
CALL_BYTES = 80
ANSWER_BYTES = 32
PROOF_BYTES = 16

_NONCE = 16
_SHORT = 8


class Knock:
    """A caller's side. Send ``call``, then ``proof(answer)``."""

    def __init__(self, eras: Sequence[Era]) -> None:
        """``eras``: the present one first, at most ``MAX_ERAS`` are used."""
        self._eras = eras[:MAX_ERAS]
        self._nonce = secrets.token_bytes(_NONCE)
        tags = [_tag(era, b"call", self._nonce)[:_SHORT] for era in self._eras]
        tags += [secrets.token_bytes(_SHORT) for _ in range(MAX_ERAS - len(tags))]
        self.call = self._nonce + b"".join(tags)

    def proof(self, answer: bytes) -> bytes:
        """The last message; ProtocolError if the server did not make ``answer`` with a secret that
        this side knows: a server that does not hold one says nothing."""
        theirs, tag = answer[:_NONCE], answer[_NONCE:]
        for era in self._eras:
            if hmac.compare_digest(_tag(era, b"answer", self._nonce + theirs), tag):
                return _tag(era, b"proof", self._nonce + theirs)
        raise ProtocolError(
            "what answers there does not hold this cluster's secret; does the port belong to "
            "another program?"
        )


class Heard:
    """A server's side, for a caller whose first message was ``call``. Send ``answer``, then
    ``check`` the proof."""

    def __init__(self, call: bytes, eras: Sequence[Era]) -> None:
        """WrongSecret unless the caller knows one of the first ``MAX_ERAS`` of ``eras``."""
        nonce = call[:_NONCE]
        tags = [call[at : at + _SHORT] for at in range(_NONCE, CALL_BYTES, _SHORT)]
        for era in eras[:MAX_ERAS]:
            mine = _tag(era, b"call", nonce)[:_SHORT]
            if sum(hmac.compare_digest(mine, tag) for tag in tags):
                break
        else:
            raise WrongSecret("it does not hold this cluster's secret")
        both = nonce + secrets.token_bytes(_NONCE)
        self.answer = both[_NONCE:] + _tag(era, b"answer", both)
        self._proof = _tag(era, b"proof", both)

    def check(self, proof: bytes) -> None:
        """WrongSecret if the caller played somebody else's knock again."""
        if not hmac.compare_digest(self._proof, proof):
            raise WrongSecret("it played a recorded knock, or was changed on the way")


def _tag(era: Era, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(era.knock_key, purpose + b"\0" + nonces, "sha256")[:16]
