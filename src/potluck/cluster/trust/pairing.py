"""Pairing: one machine shows a short code, the next takes the cluster's secret over with it.

The code has nine digits. The first three find the host in the network and are no secret; SPAKE2
(RFC 9382; the package ``spake2``) makes a strong key of all nine on both sides, and a man in the
middle learns nothing except whether one guess was right. Each side then proves that it has the key,
and the secret is sent encrypted under it. A wrong proof voids the code: one guess per run.

Everything here is pure but for the random numbers; ``pairing_link.py`` moves the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from potluck.errors import ConfigurationError, ProtocolError, WrongCode

DIGITS = 9
PLATE_DIGITS = 3

_JOINER, _HOST = b"potluck joiner v1", b"potluck host v1"
_NONCE = bytes(12)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Code:
    """``274-831-927``. Printing it shows only the part that is no secret."""

    digits: str = field(repr=False)

    @property
    def plate(self) -> str:
        """The digits by which the host is found."""
        return self.digits[:PLATE_DIGITS]

    @property
    def advert_key(self) -> bytes:
        """The key of the host's adverts while it waits: a joiner that has the plate recognises
        them."""
        return hashlib.sha256(b"potluck pairing plate v1" + self.plate.encode()).digest()

    def spoken(self) -> str:
        """The code as people read it to each other."""
        return "-".join(self.digits[at : at + 3] for at in range(0, DIGITS, 3))

    def __str__(self) -> str:
        return f"{self.plate}-..."


def new_code() -> Code:
    """A random code: a million possibilities beyond the part that is public."""
    return Code(f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}")


def parse_code(text: str) -> Code:
    """A code as typed, with any blanks and dashes; ConfigurationError if it can't be one."""
    digits = "".join(each for each in text if each not in " -\u2013\u2014.\t")
    if len(digits) != DIGITS or not (digits.isascii() and digits.isdigit()):
        raise ConfigurationError(
            f"a code has {DIGITS} digits, like 274-831-927, as `potluck pair` shows it"
        )
    return Code(digits)


class Exchange:
    """One side of one run of SPAKE2. ``opening`` is to be sent; then call ``agree`` once."""

    def __init__(self, code: Code, *, is_host: bool) -> None:
        make = SPAKE2_B if is_host else SPAKE2_A
        self._is_host = is_host
        self._spake: Any = make(code.digits.encode(), idA=_JOINER, idB=_HOST)
        self.opening: bytes = self._spake.start()

    def agree(self, theirs: bytes) -> Sealing:
        """What both sides share if they used the same code. ProtocolError for a malformed message.

        Costs about 5 ms: the arithmetic is Python's.
        """
        try:
            key: bytes = self._spake.finish(theirs)
        except (SPAKEError, NotOnCurve, ValueError, AssertionError) as error:
            raise ProtocolError("a pairing message that no potluck sends") from error
        return Sealing(key, is_host=self._is_host)


class Sealing:
    """Messages under the agreed key, one in each direction, and the proof that each side has it."""

    def __init__(self, key: bytes, *, is_host: bool) -> None:
        mine, other = (_HOST, _JOINER) if is_host else (_JOINER, _HOST)
        self.proof = _derive(key, b"proof " + mine)
        self._expected = _derive(key, b"proof " + other)
        self._seal = ChaCha20Poly1305(_derive(key, b"seal " + mine))
        self._open = ChaCha20Poly1305(_derive(key, b"seal " + other))
        self._sealed = False

    def check(self, proof: bytes) -> None:
        """WrongCode if the other side does not have the same key."""
        if not hmac.compare_digest(proof, self._expected):
            raise WrongCode("the code is wrong")

    def seal(self, message: msgspec.Struct) -> bytes:
        """The only message that may be sealed under this key (its nonce is fixed)."""
        assert not self._sealed, "one message per direction: the nonce is used up"
        self._sealed = True
        return self._seal.encrypt(_NONCE, msgspec.msgpack.encode(message), None)

    def open(self, data: bytes, type: type[T]) -> T:
        """What the other side sealed; ProtocolError if it was changed on the way."""
        try:
            return msgspec.msgpack.decode(self._open.decrypt(_NONCE, data, None), type=type)
        except (InvalidTag, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError("a sealed pairing message was changed on the way") from error


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"potluck pairing v1 " + purpose, "sha256")
