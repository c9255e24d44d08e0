"""``Replica``: the state of each server, primary or not: all models, with the server's own tensors,
and the newest entries of the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from potluck.errors import ProtocolError
from potluck.parameter_server.layout import Layout, Placement, Tensors, plain
from potluck.parameter_server.log import (
    Drop,
    Entry,
    Grant,
    Leave,
    Log,
    Position,
    Save,
    SetParameters,
    Update,
)
from potluck.parameter_server.model import MAX_STAGED, Gradient, Mode, Model
from potluck.parameter_server.optimizers import Optimizer
from potluck.services.presence import Presence
from potluck.services.waits import WaitingCalls


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


@dataclass(eq=False, repr=False)
class Replica:
    """All is changed with the lock ``changed`` held. ``server``, one of ``servers``, is this one;
    each tensor lies on ``copies`` of them. ``presence`` knows the workers."""

    mode: Mode
    optimizer: Optimizer
    presence: Presence
    server: str = "0"
    servers: tuple[str, ...] = ("0",)
    copies: int = 1

    def __post_init__(self) -> None:
        self.arguments = arguments_of(self.mode, self.optimizer, self.servers, self.copies)
        self.changed = threading.Condition(threading.RLock())
        self.log = Log()
        self.models: dict[str, Model] = {}
        self._unset: dict[str, Model] = {}
        """Models of which only first parameters are staged."""
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

    def look(self) -> None:
        """Something has changed: end the waits that are over."""
        self.waits.look()
        self.changed.notify_all()

    def placement(self, present: Iterable[str]) -> Placement:
        """Placement over the servers that are ``present``."""
        return Placement(self.servers, self.copies, tuple(present))

    def known_or_new(self, name: str) -> Model:
        """The model ``name``; without parameters if it is none of ``models``."""
        found = self.models.get(name) or self._unset.get(name)
        if found is None:
            here = self.placement([self.server])
            found = Model(name, self.mode, self.optimizer, here, self.decide)
        return found

    def stage(
        self, name: str, of: Gradient, tensors: Tensors, what: str, layout: Layout | None = None
    ) -> bool:
        """``Model.stage`` of a model that may be unknown here."""
        model = self.known_or_new(name)
        num_first = sum(bool(each.staged.get(of.worker)) for each in self._unset.values())
        if not model.stage(of, tensors, what, layout, num_first < MAX_STAGED):
            return False
        if not model.is_set:
            self._unset[name] = model
        return True

    # -- the log

    def decide(self, entry: Entry) -> None:
        """On the primary: append a decision, and apply it."""
        assert self.term is not None
        self.apply(entry, self.term)

    def apply(self, entry: Entry, term: int) -> None:
        """Append a decision of the primary of ``term``, and apply it. ProtocolError if it needs
        tensors that are not here: then the state stays as it was, and the servers agree anew."""
        try:
            match entry:
                case SetParameters(name):
                    model = self.known_or_new(name)
                    model.follow(entry)
                    self.models[name] = self._unset.pop(name, model)
                case Update(name) | Grant(name):
                    self.models[name].follow(entry)
                case Drop(name):
                    self.known_or_new(name).follow(entry)
                case Leave(worker):
                    self.presence.leave(worker)
                    for model in self.models.values():
                        model.follow(entry)
                case Save(number):
                    self.checkpoint = number
        except (ProtocolError, LookupError) as error:
            self.term = None
            raise ProtocolError(f"entry {self.log.last.number + 1}: {error}") from error
        self.log.append(entry, term)

    def begin(self, term: int, position: Position, checkpoint: int) -> None:
        """All servers have the state of ``position``, and checkpoints up to number
        ``checkpoint``. What is in no entry is forgotten, on all alike."""
        self.term = self.last_term = term
        self.checkpoint = checkpoint
        self.log.begin(position)
        self._unset.clear()
        for model in self.models.values():
            model.begin()
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
            "shard": {
                name: {"layout": plain(model.layout), "table": model.table.state()}
                for name, model in self.models.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``, or of its ``models`` alone, of another server: then
        ``Model.install`` adds tensors. Without models if it has none. ``begin`` comes after it."""
        self.models, self._unset = {}, {}
        for name, each in state.get("models", {}).items():
            self.models[name] = self.known_or_new(name)
            self.models[name].load(each)
        for name, each in state.get("shard", {}).items():
            self.models[name].table.install(each["table"])
        self.term = self.last_term = None
