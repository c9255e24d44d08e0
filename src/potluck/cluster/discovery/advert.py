"""Adverts: the information that a node sends to its network (version, port, a random id, a tag).
Pure.

The tag is an HMAC under a key that only members of the cluster can derive, so adverts of other
clusters and forged adverts are dropped without a connection. An advert that is replayed from
another address makes a hint without a node behind it. An advert has no name of a host, node or
cluster: the id is new at each start, and two tags of one cluster have nothing in common.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ADVERT_VERSION = 1
INSTANCE_BYTES = 16
TAG_BYTES = 16

_LABEL = b"potluck advert tag v1"
_SIGNED = struct.Struct("<HH16s")
_BEACON = struct.Struct("<4sHH16s16s")
_MAGIC = b"plck"

BEACON_BYTES = _BEACON.size


@dataclass(frozen=True, slots=True)
class Advert:
    """The advert of a node that listens on TCP ``port``; ``instance`` is random, new at each
    start."""

    version: int
    port: int
    instance: bytes
    tag: bytes


@dataclass(frozen=True, slots=True)
class Hint:
    """An address at which a node may listen. ``source`` is the name of the finder; ``instance``
    (hex) is empty if the address is not from an advert."""

    host: str
    port: int
    source: str
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Presence:
    """The adverts that this process sends, and the keys by which it recognises others.

    ``keys()`` returns the keys of tags (32 bytes each): the first is used for this process's
    adverts, and adverts under any of them are recognised. With ``port`` 0 the process sends no
    adverts.
    """

    keys: Callable[[], Sequence[bytes]]
    port: int
    instance: bytes

    def advert(self) -> Advert:
        """The advert to send now."""
        return make_advert(self.keys()[0], self.port, self.instance)

    def recognises(self, advert: Advert) -> bool:
        """Whether this advert was made by another process that holds one of the keys. Takes about
        5 us."""
        if advert.version != ADVERT_VERSION or not advert.port or advert.instance == self.instance:
            return False
        signed = _SIGNED.pack(advert.version, advert.port, advert.instance)
        return any(hmac.compare_digest(_tag(key, signed), advert.tag) for key in self.keys())


def new_instance() -> bytes:
    """A random id for one run of one process."""
    return secrets.token_bytes(INSTANCE_BYTES)


def make_advert(key: bytes, port: int, instance: bytes) -> Advert:
    """The advert of a process that listens on ``port``, tagged under ``key``."""
    signed = _SIGNED.pack(ADVERT_VERSION, port, instance)
    return Advert(ADVERT_VERSION, port, instance, _tag(key, signed))


def encode_beacon(advert: Advert) -> bytes:
    """The datagram of a beacon, 40 bytes."""
    return _BEACON.pack(_MAGIC, advert.version, advert.port, advert.instance, advert.tag)


def decode_beacon(data: bytes) -> Advert | None:
    """The advert in a datagram; None if the datagram is no beacon. Does not check the tag."""
    if len(data) != BEACON_BYTES:
        return None
    magic, version, port, instance, tag = _BEACON.unpack(data)
    return Advert(version, port, instance, tag) if magic == _MAGIC else None


def _tag(key: bytes, signed: bytes) -> bytes:
    return hmac.digest(key, _LABEL + signed, "sha256")[:TAG_BYTES]
