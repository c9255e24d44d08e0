"""The server's side of secure aggregation: sums masked words, and removes the masks of the sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.errors import FederationError
from potluck.federated.secure import shamir
from potluck.federated.secure.client import pair_seed
from potluck.federated.secure.masking import Words, mask


class MaskingServer:
    """One round on the server. It sees keys, sealed shares, masked words, and shares of secrets of
    which it may open one per client."""

    def __init__(self, threshold: int, session: bytes) -> None:
        self._threshold = threshold
        self._session = session
        self.keys: dict[str, Mapping[str, bytes]] = {}
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self.masked: dict[str, Words] = {}

    def take_keys(self, keys: Mapping[str, Mapping[str, bytes]]) -> None:
        """The public keys of all clients that answered."""
        self._check(len(keys), "sent keys")
        self.keys = dict(keys)

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

    def total(self, opened: Mapping[str, Mapping[str, Mapping[str, bytes]]]) -> Words:
        """The sum of the survivors' words, modulo 2**32, by the shares that clients ``opened``.

        FederationError if fewer than the threshold answered, ValueError for shares that do not
        belong together.
        """
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
            total -= mask(shamir.join(seeds[name]), length)
        for name in self._sealed.keys() - self.masked.keys():
            own = X25519PrivateKey.from_private_bytes(shamir.join(keys[name]))
            if own.public_key().public_bytes_raw() != self.keys[name]["mask"]:
                raise ValueError(f"the shares of client {name} give another key than its own")
            for other in self.masked:
                pair = mask(pair_seed(own, self.keys[other]["mask"], self._session), length)
                if other < name:
                    total -= pair
                else:
                    total += pair
        return total

    def _check(self, num: int, did: str) -> None:
        if num < self._threshold:
            raise FederationError(
                f"secure aggregation: {num} clients {did}, {self._threshold} are needed"
            )
