"""A client's side of secure aggregation (Bonawitz et al. 2017, "Practical secure aggregation for
privacy-preserving machine learning", figure 4, for a server that is curious but follows the
protocol)."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from potluck._core.shamir import WITH_CHECK, share_bytes, split
from potluck.federated.secure.masking import Words, derived, mask

MIN_THRESHOLD = 3
"""From the sum of two changes each of the two clients could compute the other's."""
_DIGEST_BYTES = 32
_DIGESTS_BYTES = 2 * _DIGEST_BYTES
SHARE_BYTES = share_bytes(WITH_CHECK)
SEALED_BYTES = _DIGESTS_BYTES + 12 + 2 * SHARE_BYTES + 16
"""Two shares for one client: their digests, a nonce, the shares encrypted, and a tag."""


class Unreadable(ValueError):
    """The shares that ``clients`` made for this client can't be decrypted, or do not have their
    digests."""

    def __init__(self, clients: list[str]) -> None:
        names = ", ".join(clients)
        super().__init__(f"the share of client {names} was changed on its way, or never right")
        self.clients = clients


class MaskingClient:
    """One client in one round: ``keys``, ``shares``, ``masked`` and ``unmask`` in this order, each
    once. ``name`` is the client's, ``session`` the round's."""

    def __init__(self, name: str, session: bytes) -> None:
        self._name = name
        self._session = session
        self._own = X25519PrivateKey.generate()
        self._channel = X25519PrivateKey.generate()
        self._self_seed = secrets.token_bytes(32)
        self._points: dict[str, int] = {}
        self._public: dict[str, tuple[bytes, bytes]] = {}
        self._threshold = 0
        self._sealed: dict[str, bytes] = {}
        self._step = 0

    def keys(self) -> dict[str, bytes]:
        """The public keys: of the pairwise masks, and of the channels between clients."""
        self._next(1)
        return {
            "mask": self._own.public_key().public_bytes_raw(),
            "channel": self._channel.public_key().public_bytes_raw(),
        }

    def shares(self, keys: Mapping[str, Mapping[str, bytes]], threshold: int) -> dict[str, bytes]:
        """For each client in ``keys``, this one among them, a share of this client's secrets, which
        only that client can read.

        ValueError if the keys are fewer than ``threshold``, not distinct, or without this client's;
        or if fewer than most of them could open a mask: then two answers to different questions
        could give away a single update.
        """
        self._next(2)
        if len(keys) < threshold or threshold < MIN_THRESHOLD or 2 * threshold <= len(keys):
            raise ValueError(
                f"a threshold of {threshold} for {len(keys)} clients: it must be above half of "
                f"them, and at least {MIN_THRESHOLD}"
            )
        mine = keys.get(self._name, {})
        if mine.get("mask") != self._own.public_key().public_bytes_raw():
            raise ValueError("the server's list of keys does not have this client's")
        everyone = [key for each in keys.values() for key in (each["mask"], each["channel"])]
        if len(set(everyone)) != len(everyone):
            raise ValueError("two keys in the server's list are equal")
        self._threshold = threshold
        self._points = {name: number for number, name in enumerate(sorted(keys), 1)}
        self._public = {name: (each["mask"], each["channel"]) for name, each in keys.items()}
        points = list(self._points.values())
        of_key = split(self._own.private_bytes_raw(), points, threshold, WITH_CHECK)
        of_seed = split(self._self_seed, points, threshold, WITH_CHECK)
        return {
            name: self._seal(name, of_key[point], of_seed[point])
            for name, point in self._points.items()
        }

    def masked(self, sealed: Mapping[str, bytes], words: Words) -> Words:
        """``words`` under this client's masks. ``sealed`` are the shares that the others have for
        this client: of all clients that are in the sum's masks."""
        self._next(3)
        if len(sealed) < self._threshold or self._name not in sealed:
            raise ValueError(f"shares of {len(sealed)} clients; {self._threshold} are needed")
        if set(sealed) - set(self._points):
            raise ValueError("shares of a client without keys")
        self._sealed = dict(sealed)
        total = words + mask(self._self_seed, len(words))
        for name in sealed:
            if name != self._name:
                pair = mask(self._pair_seed(name), len(words))
                total = total + pair if self._name < name else total - pair
        return total

    def unmask(self, survivors: list[str]) -> dict[str, dict[str, bytes]]:
        """What the server needs to remove the masks: of the ``survivors``, whose words are in the
        sum, shares of the seeds of their own masks; of the others shares of the keys of their
        pairwise masks. Never both of one client. Unreadable if another client's shares are
        wrong."""
        self._next(4)
        alive, unread = set(survivors), []
        if len(alive) < self._threshold or not alive <= self._sealed.keys():
            raise ValueError(f"{len(alive)} survivors; {self._threshold} are needed")
        seeds, keys = {}, {}
        for name, sealed in self._sealed.items():
            try:
                of_key, of_seed = self._open(name, sealed)
            except (InvalidTag, ValueError):
                unread.append(name)
                continue
            if name in alive:
                seeds[name] = of_seed
            else:
                keys[name] = of_key
        if unread:
            raise Unreadable(unread)
        return {"seeds": seeds, "keys": keys}

    # -- inside

    def _next(self, step: int) -> None:
        if self._step != step - 1:
            raise ValueError(f"step {step} of secure aggregation after step {self._step}")
        self._step = step

    def _pair_seed(self, name: str) -> bytes:
        return pair_seed(self._own, self._public[name][0], self._session)

    def _cipher(self, name: str) -> ChaCha20Poly1305:
        public = X25519PublicKey.from_public_bytes(self._public[name][1])
        return ChaCha20Poly1305(derived(self._channel.exchange(public), b"shares" + self._session))

    def _seal(self, name: str, *shares: bytes) -> bytes:
        nonce, data = os.urandom(12), b"".join(shares)
        sealed = self._cipher(name).encrypt(nonce, data, self._between(self._name, name))
        return b"".join(map(digest, shares)) + nonce + sealed

    def _open(self, name: str, sealed: bytes) -> tuple[bytes, bytes]:
        """The shares of the key and of the seed. InvalidTag or ValueError for wrong ones."""
        nonce, data = sealed[_DIGESTS_BYTES:][:12], sealed[_DIGESTS_BYTES:][12:]
        both = self._cipher(name).decrypt(nonce, data, self._between(name, self._name))
        shares = both[:SHARE_BYTES], both[SHARE_BYTES:]
        if tuple(map(digest, shares)) != digests(sealed):
            raise ValueError("the shares do not have the digests")
        return shares

    def _between(self, source: str, target: str) -> bytes:
        return msgspec.msgpack.encode((source, target, self._session))


def digest(share: bytes) -> bytes:
    """The commitment to a share, by which a client that opens another share is found out. A share
    is as random as a key, so its digest reveals nothing about it."""
    return hashlib.sha3_256(share).digest()


def digests(sealed: bytes) -> tuple[bytes, bytes]:
    """The digests of the shares of the key and of the seed in ``sealed``."""
    return sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:_DIGESTS_BYTES]


def pair_seed(own: X25519PrivateKey, public: bytes, session: bytes) -> bytes:
    """The seed of the mask between two clients; both, and no one else, can compute it."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    return derived(shared, b"mask" + session)


def as_words(array: Any) -> Words:
    """``array`` as the words that a client sends; ValueError for other types."""
    words = np.asarray(array)
    if words.dtype != np.uint32 or words.ndim != 1:
        raise ValueError(f"words have dtype uint32 and one dimension, not {words.dtype}")
    return words
