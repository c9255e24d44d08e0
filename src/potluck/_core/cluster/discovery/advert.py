"""Adverts: the information that a node sends to its network (version, port, a random id, a coarse
time, a tag). Pure.

The tag is an HMAC under a key that only members of the cluster can derive, so adverts of other
clusters and forged adverts are dropped without a connection. An advert that is replayed from
another address makes a hint without a node behind it; it is current for 10 to 20 minutes by a right
clock. An advert that is not current is no proof of a replay: one of the two clocks may be years
wrong. What follows is up to the hint book (``hints.py``). An advert has no name of a host, node or
cluster: the id is new at each start, and two tags of one cluster have nothing in common.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

ADVERT_VERSION = 2
WINDOW_S = 600
INSTANCE_BYTES = 16
TAG_BYTES = 16

_LABEL = b"potluck advert tag v2"
_SIGNED = struct.Struct("<HH16sI")
_BEACON = struct.Struct("<4sHH16sI16s")
_MAX_WINDOW = (1 << 32) - 1
_MAGIC = b"plck"

BEACON_BYTES = _BEACON.size


@dataclass(frozen=True, slots=True)
class Advert:
    """The advert of a node that listens on TCP ``port``; ``instance`` is random, new at each
    start; ``window`` is the time by the node's clock, in windows of ``WINDOW_S`` since 1970."""

    version: int
    port: int
    instance: bytes
    window: int
    tag: bytes


@dataclass(frozen=True, slots=True)
class Hint:
    """An address at which a node may listen. ``source`` is the name of the finder; ``instance``
    (hex) is empty if the address is not from an advert. ``is_current``: the advert was made about
    now, by the clock of this machine."""

    host: str
    port: int
    source: str
    instance: str = ""
    is_current: bool = True


def new_instance() -> bytes:
    """A random id for one run of one process."""
    return secrets.token_bytes(INSTANCE_BYTES)


def make_advert(key: bytes, port: int, instance: bytes, window: int) -> Advert:
    """The advert of a process that listens on ``port``, tagged under ``key``."""
    signed = _SIGNED.pack(ADVERT_VERSION, port, instance, window)
    return Advert(ADVERT_VERSION, port, instance, window, _tag(key, signed))


def is_genuine(advert: Advert, key: bytes) -> bool:
    """Whether ``advert`` was tagged under ``key``."""
    signed = _SIGNED.pack(advert.version, advert.port, advert.instance, advert.window)
    return hmac.compare_digest(_tag(key, signed), advert.tag)


def window_at(unix_time: float) -> int:
    """The number of the window of ``unix_time``."""
    return min(max(int(unix_time // WINDOW_S), 0), _MAX_WINDOW)


def encode_beacon(advert: Advert) -> bytes:
    """The datagram of a beacon, 44 bytes."""
    return _BEACON.pack(
        _MAGIC, advert.version, advert.port, advert.instance, advert.window, advert.tag
    )


def decode_beacon(data: bytes) -> Advert | None:
    """The advert in a datagram; None if the datagram is no beacon. Does not check the tag."""
    if len(data) != BEACON_BYTES:
        return None
    magic, version, port, instance, window, tag = _BEACON.unpack(data)
    return Advert(version, port, instance, window, tag) if magic == _MAGIC else None


def _tag(key: bytes, signed: bytes) -> bytes:
    return hmac.digest(key, _LABEL + signed, "sha256")[:TAG_BYTES]
