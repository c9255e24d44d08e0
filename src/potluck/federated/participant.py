"""``Participant``: a client of a federation, on its own side. Simulations and jobs use the same."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from potluck.federated.definition import ClientFunction, Site, at
from potluck.federated.parameters import Parameters, arrays_of, checked, like
from potluck.federated.secure.participant import SecureParticipant
from potluck.federated.updates import Update, checked_update

_OWN = Path(__file__).parent

Answer = dict[str, Any]
"""What a client answers: ``{"refused": why}``, or what the method is to return."""


class Participant:
    """The client at ``site``, with its function. Calls one method at a time."""

    def __init__(self, function: ClientFunction, site: Site, *, tells: bool) -> None:
        """``tells``: what the function raises is told with its text, which may quote data;
        otherwise only type and place are. ``complain(text)`` gets the whole on the client's own
        side."""
        self._function = function
        self._site = site
        self._tells = tells
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
        """Carry out ``method``. Raises nothing."""
        try:
            if method not in self._methods:
                return {"refused": f"this client has no method {method!r}"}
            return self._methods[method](**arguments)
        except BaseException as error:  # a server waits; SystemExit and the like end no client
            self.complain("".join(traceback.format_exception(error)))
            return {"refused": self._told(error)}

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

    def _told(self, error: BaseException) -> str:
        """What the server is told of ``error``: the text of an error of potluck's own checks, else
        the type and the innermost place outside of potluck."""
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [each for each in frames if not Path(each.filename).is_relative_to(_OWN)]
        kind = type(error).__name__
        if not theirs:
            return f"{kind}: {_text_of(error)}"
        own_file = getattr(getattr(self._function, "__code__", None), "co_filename", "")
        place = next((each for each in reversed(theirs) if each.filename == own_file), theirs[-1])
        where = f"{place.filename.rpartition('/')[2]}:{place.lineno} in {place.name}"
        text = f": {_text_of(error)}" if self._tells else ""
        return f"{kind}{text} (at {where})"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text can't be made)"
