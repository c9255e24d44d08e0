"""A client of a federation, on its own side, in simulations and in jobs: ``Participant``, and
``SecureParticipant``, its methods for secure aggregation."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from potluck.federated.definition import ClientFunction, Site, at
from potluck.federated.parameters import (
    Parameters,
    Update,
    arrays_of,
    checked,
    checked_update,
    flat,
    like,
)
from potluck.federated.privacy import clipped
from potluck.federated.secure.client import MaskingClient, Unreadable
from potluck.federated.secure.masking import Scale

_OWN = Path(__file__).parent

Answer = dict[str, Any]
"""A client's answer: ``{"refused": why}``, or the result of the method."""


class Participant:
    """The client at ``site``, with its function. Calls one method at a time."""

    def __init__(self, function: ClientFunction, site: Site, *, sends_texts: bool) -> None:
        """``sends_texts``: the server gets the texts of the function's errors, which may quote
        data; otherwise only their type and place. ``complain(text)`` gets the whole error on the
        client's own side."""
        self._function = function
        self._site = site
        self._sends_texts = sends_texts
        self.complain: Callable[[str], None] = lambda text: None
        secure = SecureParticipant(site.client, self.update)
        self._methods: dict[str, Callable[..., Answer]] = {
            "train": self._train,
            "secure_keys": secure.keys,
            "secure_shares": secure.shares,
            "secure_masked": secure.masked,
            "secure_unmask": secure.unmask,
        }

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Answer:
        """Run ``method``; an error becomes ``{"refused": why}``."""
        try:
            if method not in self._methods:
                return {"refused": f"this client has no method {method!r}"}
            return self._methods[method](**arguments)
        except BaseException as error:  # the server waits, and SystemExit must not end a client
            self.complain("".join(traceback.format_exception(error)))
            return {"refused": self._reason(error)}

    def update(self, parameters: Parameters, config: Mapping[str, Any]) -> Update:
        """Train; the update is checked. The function gets a copy of ``parameters``."""
        given = like(parameters, arrays_of(parameters))
        found = at(self._site, lambda: self._function(given, config))
        return checked_update(found, parameters, self._site.client)

    def _train(self, parameters: Any, config: Mapping[str, Any]) -> Answer:
        update = self.update(checked(parameters, "the global parameters"), config)
        return {
            "parameters": update.parameters,
            "num_samples": update.num_samples,
            "metrics": dict(update.metrics),
        }

    def _reason(self, error: BaseException) -> str:
        """The part of ``error`` for the server: the text of an error of potluck's own checks, else
        the type and the innermost place outside of potluck."""
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [each for each in frames if not Path(each.filename).is_relative_to(_OWN)]
        kind = type(error).__name__
        if not theirs:
            return f"{kind}: {_text_of(error)}"
        own_file = getattr(getattr(self._function, "__code__", None), "co_filename", "")
        place = next((each for each in reversed(theirs) if each.filename == own_file), theirs[-1])
        where = f"{place.filename.rpartition('/')[2]}:{place.lineno} in {place.name}"
        text = f": {_text_of(error)}" if self._sends_texts else ""
        return f"{kind}{text} (at {where})"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text can't be made)"


Train = Callable[[Any, Mapping[str, Any]], Update]


class SecureParticipant:
    """The methods of client ``name`` for secure aggregation, with ``train``, which makes a checked
    update. Only the newest round counts."""

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
