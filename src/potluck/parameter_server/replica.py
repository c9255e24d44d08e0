"""``Replica``: what each server keeps, whichever is the first one: the versions of all models and
what became of pushes, its own tensors, and the newest entries of the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from potluck.errors import ProtocolError
from potluck.parameter_server.entries import AnyEntry, Entry, Leave, SetParameters
from potluck.parameter_server.log import Log, Position
from potluck.parameter_server.model import Model
from potluck.parameter_server.modes import Mode
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.shard import Shard
from potluck.services.presence import Presence
from potluck.services.waits import WaitingCalls

NO_PART: Mapping[str, Any] = {"tensors": {}, "optimizer": {}, "num_steps": 0, "mixed": None}
"""Of a table without tensors."""


class Replica:
    """All is changed with the lock ``changed`` held. ``server``, one of ``servers``, is this one;
    each tensor lies on ``copies`` of them. ``presence`` knows the workers."""

    def __init__(
        self,
        mode: Mode,
        optimizer: Optimizer,
        presence: Presence,
        server: str = "0",
        servers: tuple[str, ...] = ("0",),
        copies: int = 1,
    ) -> None:
        self.mode = mode
        self.optimizer = optimizer
        self.presence = presence
        self.server = server
        self.servers = servers
        self.copies = copies
        self.changed = threading.Condition(threading.RLock())
        self.log = Log(self.changed)
        self.models: dict[str, Model] = {}
        self.shard = Shard(optimizer, server, servers, copies)
        self.incarnation: int | None = None
        """Another number each time that the servers agree on a state, a greater one if there are
        several: what was pulled before is of another life. None: they have not agreed."""
        self.is_whole = False
        """Whether this is the state of ``log.position``."""
        self.begun = 0
        """The last ``incarnation`` that was not None."""
        self.on_time: Callable[[], None] = self.look
        """Called when the wait of a call ends by its time."""
        self.waits = WaitingCalls(
            self.changed, lambda: self.on_time(), thread="potluck-parameter-server"
        )

    @property
    def arguments(self) -> tuple[str, str, str, str]:
        """Mode, optimizer, servers and replicas, which all workers must give alike."""
        servers = ", ".join(self.servers)
        return repr(self.mode), repr(self.optimizer), servers, str(self.copies - 1)

    def look(self) -> None:
        """Something has changed: end the waits that are over."""
        self.waits.look()
        self.changed.notify_all()

    # -- the log

    def decided(self, entry: Entry) -> None:
        """On the first server: a decision, which ``models`` have noted already."""
        assert self.incarnation is not None
        self.log.append(entry, self.incarnation)
        self.shard.carry_out(entry)

    def carry_out(self, entry: AnyEntry, incarnation: int) -> None:
        """On another server: a decision of the first one of ``incarnation``. ProtocolError if it
        needs what is not here: then the state stays the one before, and the servers agree anew."""
        try:
            self.shard.carry_out(entry)
        except (ProtocolError, LookupError) as error:
            self.incarnation = None
            raise ProtocolError(f"entry {self.log.index + 1}: {error}") from error
        match entry:
            case SetParameters(name, layout) if name not in self.models:
                rate = self.optimizer.learning_rate
                self.models[name] = Model(name, layout, self.mode, rate)
            case Leave(worker):
                self.presence.leave(worker)
        model = self.models.get(getattr(entry, "model", ""))
        if model is not None:
            model.follow(entry)
        self.log.append(entry, incarnation)

    def begin(self, incarnation: int, index: int, position: Position) -> None:
        """All servers have this state, that of ``position``; numbers of new entries are above
        ``index``. What is in no entry is forgotten, on all alike."""
        self.incarnation = self.begun = incarnation
        self.is_whole = True
        self.log.position = position
        self.log.begin(index)
        self.shard.forget_staged()
        for model in self.models.values():
            model.forget_waiting()
        self.presence.begin_anew()
        self.look()

    # -- the whole state

    def state(self, incarnation: int) -> dict[str, Any]:
        """As a checkpoint of ``incarnation`` holds it; without what workers push again. Versions
        are immutable, so nothing is copied."""
        return {
            "servers": list(self.servers),
            "copies": self.copies,
            "incarnation": incarnation,
            "models": {name: model.state() for name, model in self.models.items()},
            "shard": self.shard.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``; without models if it has none. ``begin`` comes after it."""
        rate = self.optimizer.learning_rate
        self.models = {
            name: Model.of_state(name, each, self.mode, rate)
            for name, each in state.get("models", {}).items()
        }
        self.shard.restore(state.get("shard", {}))
        self.is_whole, self.incarnation = False, None

    def take(self, models: Mapping[str, Any]) -> None:
        """Instead of the present state that of another server, without tensors: ``models`` of its
        ``state``. ``take_part`` adds these, ``begin`` comes last."""
        self.restore({"models": models})
        for name, model in self.models.items():  # also those of which no tensor lies here
            self.shard.take(name, model.layout, NO_PART)

    def take_part(self, model: str, part: Mapping[str, Any]) -> None:
        """Some tensors of ``model`` and what the optimizer keeps of them, of another server."""
        self.shard.take(model, self.models[model].layout, part)
