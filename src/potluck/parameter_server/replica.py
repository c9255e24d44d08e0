"""``Replica``: the state of each server, primary or not: the versions of all models and the
outcomes of pushes, the server's own tensors, and the newest entries of the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from potluck.errors import ProtocolError
from potluck.parameter_server.layout import Layout, of_plain
from potluck.parameter_server.log import (
    Entry,
    Leave,
    Log,
    Position,
    Save,
    SetParameters,
)
from potluck.parameter_server.model import Mode, Model
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.shard import Shard
from potluck.services.presence import Presence
from potluck.services.waits import WaitingCalls

_NO_PART: Mapping[str, Any] = {"tensors": {}, "optimizer": {}, "num_steps": 0, "mixed": None}
"""Of a table without tensors."""


class AskAgain(Exception):
    """A server can't answer yet: the caller is to make the call again. It sees the name alone."""


def arguments_of(
    mode: Mode, optimizer: Optimizer, servers: tuple[str, ...], copies: int
) -> dict[str, str]:
    """The arguments that all workers must give alike, by name."""
    return {
        "mode": repr(mode),
        "optimizer": repr(optimizer),
        "servers": ", ".join(servers),
        "replicas": str(copies - 1),
    }


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
        self.log = Log()
        self.models: dict[str, Model] = {}
        self.shard = Shard(optimizer, server, servers, copies)
        self.term: int | None = None
        """The term, as in Raft: another number each time that the servers agree on a state, with
        several servers a greater number. None: they have not agreed."""
        self.last_term: int | None = None
        """The last ``term`` that began with this state; None if the state is not whole."""
        self.checkpoint = 0
        """The highest number of a checkpoint."""
        self.is_closed = False
        """Whether the primary has ended, after all workers have left."""
        self.on_time: Callable[[], None] = self.look
        """Called when the wait of a call ends by its time."""
        self.waits = WaitingCalls(
            self.changed, lambda: self.on_time(), thread="potluck-parameter-server"
        )

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments that all workers must give alike."""
        return arguments_of(self.mode, self.optimizer, self.servers, self.copies)

    def look(self) -> None:
        """Something has changed: end the waits that are over."""
        self.waits.look()
        self.changed.notify_all()

    def new_model(self, name: str, layout: Layout) -> Model:
        """A model without a version, now one of ``models``."""
        rate = self.optimizer.learning_rate
        self.models[name] = Model(name, layout, self.mode, rate, self.decide)
        return self.models[name]

    # -- the log

    def decide(self, entry: Entry) -> None:
        """On the primary: append a decision, and apply it."""
        assert self.term is not None
        self.apply(entry, self.term)

    def apply(self, entry: Entry, term: int) -> None:
        """Append a decision of the primary of ``term``, and apply it. ProtocolError if it needs
        tensors that are not here: then the state stays as it was, and the servers agree anew."""
        try:
            self.shard.apply(entry)
        except (ProtocolError, LookupError) as error:
            self.term = None
            raise ProtocolError(f"entry {self.log.last.number + 1}: {error}") from error
        match entry:
            case SetParameters(name, layout) if name not in self.models:
                self.new_model(name, layout)
            case Leave(worker):
                self.presence.leave(worker)
            case Save(number):
                self.checkpoint = number
        model = self.models.get(getattr(entry, "model", ""))
        if model is not None:
            model.follow(entry)
        self.log.append(entry, term)

    def begin(self, term: int, position: Position, checkpoint: int) -> None:
        """All servers have the state of ``position``, and checkpoints up to number
        ``checkpoint``. What is in no entry is forgotten, on all alike."""
        self.term = self.last_term = term
        self.checkpoint = checkpoint
        self.log.begin(position)
        self.shard.forget_staged()
        for model in self.models.values():
            model.forget_waiting()
        self.presence.begin_anew()
        self.look()

    # -- the whole state

    def state(self, term: int) -> dict[str, Any]:
        """What a checkpoint of ``term`` holds: not waiting gradients, which workers push again.
        Versions are immutable, so nothing is copied."""
        return {
            "servers": list(self.servers),
            "copies": self.copies,
            "term": term,
            "models": {name: model.state() for name, model in self.models.items()},
            "shard": self.shard.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``; without models if it has none. ``begin`` comes after it."""
        self.models = {}
        for name, each in state.get("models", {}).items():
            self.new_model(name, of_plain(each["layout"])).load(each)
        self.shard.restore(state.get("shard", {}))
        self.term = self.last_term = None

    def install(self, models: Mapping[str, Any]) -> None:
        """Replace the state by another server's, without tensors: ``models`` of its ``state``.
        ``install_part`` adds tensors, ``begin`` comes last."""
        self.restore({"models": models})
        for name, model in self.models.items():  # also models without a tensor here
            self.shard.install(name, model.layout, _NO_PART)

    def install_part(self, model: str, part: Mapping[str, Any]) -> None:
        """Add tensors of ``model`` and their optimizer's state, of another server."""
        self.shard.install(model, self.models[model].layout, part)
