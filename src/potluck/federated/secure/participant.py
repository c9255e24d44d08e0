"""A client's answers in secure aggregation: its masks, around its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from potluck.federated.parameters import checked, flat
from potluck.federated.privacy import clipped
from potluck.federated.secure.client import MaskingClient, Unreadable
from potluck.federated.secure.masking import Scale
from potluck.federated.updates import Update

Train = Callable[[Any, Mapping[str, Any]], Update]


class SecureParticipant:
    """The secure side of client ``name``, whose ``train`` makes a checked update. Of several rounds
    under way only the newest counts."""

    def __init__(self, name: str, train: Train) -> None:
        self._name = name
        self._train = train
        self._session = b""
        self._masks: MaskingClient | None = None

    def keys(self, session: bytes) -> dict[str, Any]:
        """Begin a round."""
        self._session = bytes(session)
        self._masks = MaskingClient(self._name, self._session)
        return {"keys": self._masks.keys()}

    def shares(
        self, session: bytes, keys: Mapping[str, Mapping[str, bytes]], threshold: int
    ) -> dict[str, Any]:
        """Shares of this client's secrets, one for each client."""
        return {"shares": self._now(session).shares(keys, threshold)}

    def masked(
        self,
        session: bytes,
        sealed: Mapping[str, bytes],
        parameters: Any,
        config: Mapping[str, Any],
        limit: float,
        max_samples: float,
        num_clients: int,
        clip: float | None,
    ) -> dict[str, Any]:
        """Train, and mask the change of the parameters. With ``clip`` the change is clipped to that
        norm, rounding included, and has weight 1."""
        masks = self._now(session)
        before = checked(parameters, "the global parameters")
        update = self._train(before, config)
        change = flat(update.parameters) - flat(before)
        num_samples = update.num_samples
        scale = Scale(float(limit), float(max_samples), int(num_clients))
        if clip is not None:
            bound = clip - scale.step * math.sqrt(len(change))
            if bound <= 0:
                raise ValueError(
                    f"{len(change)} parameters of {num_clients} clients are too many: their "
                    f"rounding alone can be as long as clip={clip:g}"
                )
            change, num_samples = clipped(change, bound), 1
        random = np.random.default_rng()
        words = scale.encode(change, num_samples, random)
        return {"words": masks.masked(sealed, words)}

    def unmask(self, session: bytes, survivors: list[str]) -> dict[str, Any]:
        """Open shares, so that the masks of the sum can be removed; ends the round. If
        shares are wrong, ``unread`` names the clients that made them."""
        masks, self._masks = self._now(session), None
        try:
            return masks.unmask([str(each) for each in survivors])
        except Unreadable as error:
            return {"unread": error.clients}

    def _now(self, session: bytes) -> MaskingClient:
        if self._masks is None or bytes(session) != self._session:
            raise ValueError("this round of secure aggregation is over for this client")
        return self._masks
