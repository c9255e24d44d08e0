"""Pairing: a host shows a short code, with which the key of a joining machine is admitted.

The code has nine digits. The first three identify the host's adverts and are public. From all nine,
SPAKE2 (the package ``spake2``, as in magic-wormhole) derives a strong key on both machines; a man
in the middle learns only whether one guess of the code is right. Each machine then proves that it
has the key. A wrong proof voids the code, so an attacker has one guess for each code.

Under the agreed key the joining machine proves its own Ed25519 key. Both screens then show the same
three words (``Sealing.words``), which depend on the run and on that key, and a person on each side
says yes. Only then the host admits the key, and sends the secret and the list of admitted keys.

``Exchange`` and ``Sealing`` do no I/O: ``pairing_host.py`` and ``pairing_joiner.py`` send and
receive the messages, with the deadlines and the question that both machines share (``receive``,
``agreed``)."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from potluck._core.background import stop
from potluck._core.cluster.trust.secret import word_list
from potluck._core.wire import pairing as wire
from potluck._core.wire.format import decoded
from potluck.errors import ConfigurationError, LinkError, ProtocolError, WrongCode

DIGITS = 9
PLATE_DIGITS = 3

_JOINER, _HOST = b"potluck joiner v2", b"potluck host v2"
_NONCE = bytes(12)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Code:
    """A pairing code like ``274-831-927``. ``str`` and ``repr`` show at most the public digits."""

    digits: str = field(repr=False)

    @property
    def plate(self) -> str:
        """The public digits, by which a joining machine finds the host."""
        return self.digits[:PLATE_DIGITS]

    @property
    def advert_key(self) -> bytes:
        """The key of the adverts of a waiting host (32 bytes), derived from ``plate``, so that a
        joining machine recognises the adverts."""
        return _key_of_plate(self.plate)

    def spoken(self) -> str:
        """The nine digits with dashes, as people read the code to each other. Secret."""
        return "-".join(self.digits[at : at + 3] for at in range(0, DIGITS, 3))

    def __str__(self) -> str:
        return f"{self.plate}-..."


def plate_of(is_tagged_by: Callable[[bytes], bool]) -> str:
    """The public digits whose key a host's advert is tagged by; empty if it is no such advert.
    Takes some milliseconds."""
    plates = (f"{number:0{PLATE_DIGITS}d}" for number in range(10**PLATE_DIGITS))
    return next((plate for plate in plates if is_tagged_by(_key_of_plate(plate))), "")


def _key_of_plate(plate: str) -> bytes:
    return hashlib.sha256(b"potluck pairing plate v1" + plate.encode()).digest()


def new_code() -> Code:
    """A random code; its six secret digits have a million values."""
    return Code(f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}")


def parse_code(text: str) -> Code:
    """The code in a typed text with any blanks and dashes; ConfigurationError if ``text`` has not
    nine digits."""
    digits = "".join(each for each in text if each not in " -\u2013\u2014.\t")
    if len(digits) != DIGITS or not (digits.isascii() and digits.isdigit()):
        raise ConfigurationError(
            f"a code has {DIGITS} digits, like 274-831-927, as `potluck pair` shows it"
        )
    return Code(digits)


class Exchange:
    """A run of SPAKE2 on one machine. Send ``opening`` to the peer, then call ``agree`` once."""

    def __init__(self, code: Code, *, is_host: bool) -> None:
        make = SPAKE2_B if is_host else SPAKE2_A
        self._is_host = is_host
        self._spake: Any = make(code.digits.encode(), idA=_JOINER, idB=_HOST)
        self.opening: bytes = self._spake.start()

    def agree(self, theirs: bytes) -> Sealing:
        """The key agreed with the sender of the opening ``theirs``, the same on both machines if
        they used the same code. ProtocolError for a malformed opening.

        Costs about 5 ms: the arithmetic is in Python.
        """
        try:
            key: bytes = self._spake.finish(theirs)
        except (SPAKEError, NotOnCurve, ValueError, AssertionError) as error:
            raise ProtocolError("a pairing message that no potluck sends") from error
        return Sealing(key, is_host=self._is_host)


class Sealing:
    """Encryption with the agreed key of one message in each direction, and proofs of the key."""

    def __init__(self, key: bytes, *, is_host: bool) -> None:
        mine, other = (_HOST, _JOINER) if is_host else (_JOINER, _HOST)
        self.session = _derive(key, b"session")
        """32 bytes that only the two machines of this run know."""
        self.yes = _derive(key, b"yes")
        """What the joining machine sends when its person agrees."""
        self.proof = _derive(key, b"proof " + mine)
        self._expected = _derive(key, b"proof " + other)
        self._seal = ChaCha20Poly1305(_derive(key, b"seal " + mine))
        self._open = ChaCha20Poly1305(_derive(key, b"seal " + other))
        self._sealed = False

    def newcomer(self, key: Ed25519PrivateKey, name: str) -> wire.Newcomer:
        """The joining machine's proof of its own ``key``."""
        public = key.public_key().public_bytes_raw()
        return wire.Newcomer(public, name[:64], key.sign(self._claim(public)))

    def check_newcomer(self, newcomer: wire.Newcomer) -> None:
        """ProtocolError unless the joining machine has the key that it names."""
        try:
            key = Ed25519PublicKey.from_public_bytes(newcomer.key)
            key.verify(newcomer.signature, self._claim(newcomer.key))
        except (InvalidSignature, ValueError) as error:
            raise ProtocolError("the joining machine did not prove its key") from error

    def words(self, key: bytes) -> str:
        """Three words (33 bits) for people to compare, the same on both machines if both speak with
        each other and mean the same ``key`` of the joining machine."""
        digest = hmac.digest(self.session, b"words" + key, "sha256")
        number = int.from_bytes(digest[:5], "big")
        words = word_list()
        return " ".join(words[number >> shift & 2047] for shift in (0, 11, 22))

    def _claim(self, key: bytes) -> bytes:
        return b"potluck newcomer v2" + self.session + key

    def check_yes(self, yes: bytes) -> None:
        """ProtocolError unless the joining machine's person agreed."""
        if not hmac.compare_digest(yes, self.yes):
            raise ProtocolError("the joining machine's yes was changed on the way")

    def check(self, proof: bytes) -> None:
        """WrongCode if the peer that sent ``proof`` does not have the same key."""
        if not hmac.compare_digest(proof, self._expected):
            raise WrongCode("the code is wrong")

    def seal(self, message: msgspec.Struct) -> bytes:
        """``message`` encrypted. To be called once: the nonce is fixed."""
        assert not self._sealed, "one message per direction: the nonce is used up"
        self._sealed = True
        return self._seal.encrypt(_NONCE, msgspec.msgpack.encode(message), None)

    def open(self, data: bytes, type: type[T]) -> T:
        """The peer's message decrypted; ProtocolError if it was changed on the way."""
        try:
            text = self._open.decrypt(_NONCE, data, None)
            return decoded(msgspec.msgpack.Decoder(type), text, "a pairing message")
        except (InvalidTag, ProtocolError) as error:
            raise ProtocolError("a sealed pairing message was changed on the way") from error


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"potluck pairing v2 " + purpose, "sha256")


STEP_S = 5.0
"""Deadline of one run of the protocol, from the opening to the proofs, on either machine."""
CONFIRM_S = 180.0
"""How long the two people may take to compare the words and say yes."""

Confirm = Callable[[str, str, str], Awaitable[bool]]
"""``confirm(words, name, node)``: whether the person says that both screens show these words; about
the machine that calls itself ``name`` (empty: not known yet)."""


async def receive(reader: asyncio.StreamReader, *kinds: int) -> bytes:
    """The body of the next message, of one of ``kinds``; LinkError if the connection ends."""
    try:
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, *kinds)
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError("the peer closed the connection before pairing was complete") from error


async def agreed(
    question: Awaitable[bool],
    hearing: Coroutine[Any, Any, bytes],
    say_yes: Callable[[], None] = lambda: None,
) -> bytes | None:
    """What the other machine says by ``hearing``, once this machine's person has answered
    ``question`` with yes, which ``say_yes`` tells the other machine; None after a no.

    If the other machine leaves first, the error of ``hearing`` ends the question.
    """
    asked, heard = asyncio.ensure_future(question), asyncio.ensure_future(hearing)
    try:
        await asyncio.wait((asked, heard), return_when=asyncio.FIRST_COMPLETED)
        if heard.done():
            heard.result()
        if not await asked:
            return None
        say_yes()
        return await heard
    finally:
        await stop(asked, heard)


async def first(*events: asyncio.Future[Any]) -> None:
    """Wait for one of ``events``."""
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
