"""The server's side of secure aggregation: sums masked words, and removes the masks of the sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck._core.shamir import WITH_CHECK, join
from potluck.errors import FederationError
from potluck.federated.secure.client import digest, digests, pair_seed
from potluck.federated.secure.masking import Words, mask

Opened = dict[str, dict[str, bytes]]
"""The shares that one client opened: of ``seeds`` and of ``keys``, by owner."""


class Spoiled(ValueError):
    """Clients have made the round fail: by name, what each of them did."""

    def __init__(self, clients: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"client {name} {did}" for name, did in clients.items()))
        self.clients = clients


class TooFew(FederationError):
    """Of ``began`` clients that sent keys only ``num`` stayed."""

    def __init__(self, text: str, began: int, num: int) -> None:
        super().__init__(text)
        self.began, self.num = began, num


class MaskingServer:
    """One round on the server. It sees keys, sealed shares, masked words, and shares of secrets: of
    each client either of its key or of its seed."""

    def __init__(self, threshold: int, session: bytes) -> None:
        self._threshold = threshold
        self._session = session
        self.keys: dict[str, Mapping[str, bytes]] = {}
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self.masked: dict[str, Words] = {}
        self.cheats: dict[str, str] = {}
        """Clients that opened shares which they were not given: what each did."""
        self._accusers: defaultdict[str, set[str]] = defaultdict(set)
        """By client: the clients that can't read the shares which it has made."""

    def take_keys(self, keys: Mapping[str, Mapping[str, bytes]]) -> None:
        """The public keys of all clients that answered."""
        self.keys = dict(keys)
        self._check(len(keys), "sent keys")

    def take_shares(self, sealed: Mapping[str, Mapping[str, bytes]]) -> None:
        """The sealed shares of all clients that answered: source, then target."""
        whole = {name: each for name, each in sealed.items() if each.keys() == self.keys.keys()}
        self._check(len(whole), "sent shares for all others")
        self._sealed = whole

    def shares_for(self, name: str) -> dict[str, bytes]:
        """The sealed shares for client ``name``."""
        return {source: each[name] for source, each in self._sealed.items()}

    @property
    def sharing(self) -> list[str]:
        """The clients whose masks are in the sum."""
        return list(self._sealed)

    def take_masked(self, masked: Mapping[str, Words]) -> None:
        """The masked words of all clients that answered."""
        self._check(len(masked), "sent their masked update")
        self.masked = dict(masked)

    def checked(self, client: str, answer: Mapping[str, Any]) -> Opened:
        """The shares that ``client`` opened. ValueError unless they are the shares that it was
        given, one for each client in the masks of the sum."""
        unread = sorted(self._sealed.keys() & set(map(str, answer.get("unread", ()))))
        if unread:
            for name in unread:
                self._accusers[name].add(client)
            raise ValueError(f"it can't read the shares that client {', '.join(unread)} has made")
        lost = self._sealed.keys() - self.masked.keys()
        found = {}
        for number, (kind, names) in enumerate((("keys", lost), ("seeds", self.masked.keys()))):
            opened = found[kind] = dict(answer[kind])
            if opened.keys() != names or any(
                digest(share) != digests(self._sealed[name][client])[number]
                for name, share in opened.items()
            ):
                self.cheats[client] = "opened other shares than it was given"
                raise ValueError("it opened other shares than it was given")
        return found

    def total(self, opened: Mapping[str, Opened]) -> Words:
        """The sum of the survivors' words, modulo 2**32, by the ``checked`` shares of clients.

        TooFew if fewer than the threshold answered; Spoiled if the clients at fault are known, or a
        client's shares belong to no secret.
        """
        num_borne = max(1, len(self._sealed) - self._threshold)
        spoiled = {
            name: "made shares that others can't read"
            for name, accusers in self._accusers.items()
            if len(accusers) > num_borne  # so at least one accuser is honest
        }
        if len(opened) < self._threshold and spoiled:
            raise Spoiled(spoiled)
        self._check(len(opened), "opened their shares")
        points = {name: number for number, name in enumerate(sorted(self.keys), 1)}
        seeds: dict[str, dict[int, bytes]] = defaultdict(dict)
        keys: dict[str, dict[int, bytes]] = defaultdict(dict)
        for source, each in list(opened.items())[: self._threshold]:
            for name, share in each["seeds"].items():
                seeds[name][points[source]] = share
            for name, share in each["keys"].items():
                keys[name][points[source]] = share
        length = len(next(iter(self.masked.values())))
        total = np.zeros(length, np.uint32)
        for name, words in self.masked.items():
            total += words
            total -= mask(_joined(name, seeds[name]), length)
        for name in self._sealed.keys() - self.masked.keys():
            own = X25519PrivateKey.from_private_bytes(_joined(name, keys[name]))
            if own.public_key().public_bytes_raw() != self.keys[name]["mask"]:
                raise Spoiled({name: "made shares of another key than its own"})
            for other in self.masked:
                pair = mask(pair_seed(own, self.keys[other]["mask"], self._session), length)
                if other < name:
                    total -= pair
                else:
                    total += pair
        return total

    def _check(self, num: int, did: str) -> None:
        if num < self._threshold:
            text = f"secure aggregation: {num} clients {did}, {self._threshold} are needed"
            raise TooFew(text, len(self.keys), num)


def _joined(name: str, shares: Mapping[int, bytes]) -> bytes:
    try:
        return join(shares, WITH_CHECK)
    except ValueError:
        raise Spoiled({name: "made shares that belong to no secret"}) from None
