"""What the ranks of a store say to each other: one request at a time, and its answer."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.wire.format import MessageFormat

KIND = "store"
"""The kind of these connections in ``Hello``."""

MESSAGE_S = 30.0
"""Seconds for the transfer of one message, without the wait for a key."""

_MAX_MESSAGE = 16 << 20
_MAX_KEYS = 1 << 16


class StoreRequest(msgspec.Struct, frozen=True):
    """A request: ``what`` is an operation of ``Values``, ``number`` is repeated in the answer, and
    the rank waits ``timeout_s`` for it."""

    number: int
    what: str
    keys: Annotated[list[str], msgspec.Meta(max_length=_MAX_KEYS)]
    values: Annotated[list[bytes], msgspec.Meta(max_length=2)]
    amount: int = 0
    timeout_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """The answer to request ``number``; ``error`` says why nothing was done, if it is not empty."""

    number: int
    value: bytes | int | bool | None = None
    error: str = ""


REQUEST: MessageFormat[StoreRequest] = MessageFormat(
    StoreRequest, limit=_MAX_MESSAGE, name="a request to the store"
)
ANSWER: MessageFormat[Answer] = MessageFormat(
    Answer, limit=_MAX_MESSAGE + 1024, name="an answer of the store"
)
