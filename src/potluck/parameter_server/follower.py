"""``Follower``: what the first server asks of each server, itself among them: to agree on a state,
and then to carry out the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from potluck.errors import CheckpointError, ProtocolError
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.entries import AnyEntry, Close, Save, decode, encode
from potluck.parameter_server.log import Position, after
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.signals import OutOfStep


class Follower:
    """For any number of threads. Each call names the incarnation that begins, or has begun."""

    def __init__(self, replica: Replica, checkpoints: Checkpoints | None) -> None:
        self._replica = replica
        self._checkpoints = checkpoints
        self._heard = 0
        self._failure = ""
        self._is_closed = False

    # -- agreement on a state

    def join(self, incarnation: int) -> dict[str, Any]:
        """Carry out nothing more for a first server of before. What this server has: the last
        incarnation that began here and the position of its state (None without one), the highest
        number of an entry, and the numbers of its checkpoints.

        OutOfStep if a later incarnation was heard: its caller is the first server no more.
        """
        it = self._replica
        with it.changed:
            if incarnation < self._heard:
                raise OutOfStep(f"a first server of incarnation {self._heard} was heard")
            self._heard, it.incarnation = incarnation, None
            steps = [] if self._checkpoints is None else self._checkpoints.store.steps()
            return {
                "state": [it.begun, *it.log.position] if it.is_whole else None,
                "index": max([it.log.index, *steps]),
                "steps": steps,
            }

    def kept(self, incarnation: int) -> dict[str, Any]:
        """The newest entries, for servers that lack some."""
        it = self._replica
        with self._agreeing(incarnation):
            entries = encode(it.log.entries()[1])
            return {"base": list(it.log.base), "newest": list(it.log.position), "data": entries}

    def catch_up(
        self, incarnation: int, base: Sequence[int], newest: Sequence[int], data: bytes
    ) -> bool:
        """Carry out those of another server's entries that this one lacks; False if it can't: then
        it needs a copy of all."""
        it = self._replica
        end = Position(*newest)
        with self._agreeing(incarnation):
            if not it.is_whole:
                return False
            missing = after(it.log.position, Position(*base), end, decode(data))
            if missing is None:
                return False
            try:
                for number, entry in enumerate(missing, end.number - len(missing) + 1):
                    it.log.skip_to(number)
                    self._carry_out(entry, end.incarnation)
            except ProtocolError:
                return False
            return True

    def models(self, incarnation: int) -> dict[str, Any]:
        """For a copy: the state of the models and what workers have left, and the bytes of each
        tensor by model and name."""
        it = self._replica
        with self._agreeing(incarnation):
            return {
                "models": {name: each.state() for name, each in it.models.items()},
                "gone": it.presence.gone(),
                "nbytes": {name: it.shard.names(name) for name in it.models},
            }

    def give(self, incarnation: int, model: str, names: Sequence[str]) -> dict[str, Any]:
        """Tensors for a copy, and what the optimizer keeps of them."""
        with self._agreeing(incarnation):
            return self._replica.shard.part(model, names)

    def take(self, incarnation: int, models: Mapping[str, Any], gone: Sequence[str]) -> None:
        """Begin a copy; ``take_part`` adds its tensors."""
        with self._agreeing(incarnation):
            self._replica.take(models)
            for worker in gone:
                self._replica.presence.leave(worker)

    def take_part(self, incarnation: int, model: str, part: Mapping[str, Any]) -> None:
        """Tensors of the copy that ``take`` began."""
        with self._agreeing(incarnation):
            self._replica.take_part(model, part)

    def load(self, incarnation: int, checkpoint: int | None) -> dict[str, Any]:
        """Be as a checkpoint says, or without models. The incarnation that wrote it.
        CheckpointError if it is damaged, or of other servers."""
        state: Mapping[str, Any] = {}
        if checkpoint is not None:
            if self._checkpoints is None:
                raise CheckpointError("this server has no directory for checkpoints")
            state = self._checkpoints.load(checkpoint)
        with self._agreeing(incarnation):
            self._replica.restore(state)
            return {"incarnation": int(state.get("incarnation") or 0)}

    def begin(self, incarnation: int, index: int, position: Sequence[int]) -> None:
        """All have the state of ``position``; entries with numbers above ``index`` follow."""
        with self._agreeing(incarnation):
            self._replica.log.is_kept = True
            self._replica.begin(incarnation, index, Position(*position))

    # -- the log

    def follow(self, incarnation: int, first: int, data: bytes) -> dict[str, Any]:
        """Carry out entries, of which the first has number ``first``; those that were carried out
        before are skipped, and all servers have those before ``first``. The number of the newest
        checkpoint, and why one failed.

        OutOfStep if entries before these have not been carried out here.
        """
        it = self._replica
        with it.changed:
            if incarnation != it.incarnation or first > it.log.index + 1:
                raise OutOfStep(f"this server has carried out {it.log.index} entries")
            it.log.drop_before(first)
            for entry in decode(data)[it.log.index + 1 - first :]:
                try:
                    self._carry_out(entry, incarnation)
                except ProtocolError as error:
                    raise OutOfStep(str(error)) from error
            it.look()
            saved, failure = 0, self._failure
            if self._checkpoints is not None:
                saved, failure = self._checkpoints.saved()
            return {"saved": saved, "failure": failure}

    def _carry_out(self, entry: AnyEntry, incarnation: int) -> None:
        it = self._replica
        it.carry_out(entry, incarnation)
        if isinstance(entry, Save):
            if self._checkpoints is None:
                self._failure = "it has no directory for checkpoints"
            else:
                self._checkpoints.write(it.log.index, it.state(incarnation))
        elif isinstance(entry, Close):
            self._is_closed = True

    # -- the end

    @property
    def is_closed(self) -> bool:
        """Whether the first server has ended, since all workers have left."""
        return self._is_closed

    def await_closed(self, timeout_s: float) -> bool:
        """Wait for the end of all workers; False after ``timeout_s``."""
        changed = self._replica.changed
        with changed:
            return changed.wait_for(lambda: self._is_closed, timeout_s)

    def close(self) -> None:
        """Wait for the last checkpoint. CheckpointError if it could not be written."""
        if self._checkpoints is not None:
            self._checkpoints.await_written()

    # -- inside

    @contextlib.contextmanager
    def _agreeing(self, incarnation: int) -> Iterator[None]:
        it = self._replica
        with it.changed:
            if incarnation != self._heard or it.incarnation is not None:
                raise OutOfStep(f"a first server of incarnation {self._heard} was heard")
            yield
