"""``ParameterServer``: what a script holds of a parameter server, on every worker."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from potluck._core import hints
from potluck._core.checks import Duration, checked_seconds
from potluck._core.context import DistributedContext
from potluck._core.forks import Uncopied
from potluck.checkpoint import CheckpointStore
from potluck.errors import ServiceLost, ServiceTimeout, UnknownService
from potluck.parameter_server.arguments import arrays_of, check_arguments, servers_of, store_of
from potluck.parameter_server.calls import Calls
from potluck.parameter_server.layout import Array, layout_of, plain
from potluck.parameter_server.model import (
    LIFE_BITS,
    AggregationMethod,
    Mode,
    mode_of,
)
from potluck.parameter_server.optimizers import SGD, Optimizer, check_number
from potluck.parameter_server.replica import Replica, arguments_of
from potluck.parameter_server.serving import Serving
from potluck.services.definition import check_unused, note_used
from potluck.services.presence import Presence
from potluck.services.waits import await_reply

_LEAVE_S = 5.0

_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class Pulled(NamedTuple):
    """One version of a model's parameters: arrays by name, which are the caller's own.

    ``version`` counts the updates before it. ``pulled["w"]`` is ``pulled.parameters["w"]``.
    """

    parameters: dict[str, Array]
    version: int

    def __getitem__(self, key: Any) -> Any:
        return self.parameters[key] if isinstance(key, str) else tuple.__getitem__(self, key)


class _Push(NamedTuple):
    """A gradient whose outcome is unknown."""

    arrays: dict[str, Array]
    step: int
    number: int
    term: int
    """Of the parameters that it was computed on."""


class ParameterServer(Uncopied):
    """Parameters that one worker or several keep; all workers pull them, and push gradients.

        ps = potluck.ParameterServer(ctx, optimizer=SGD(0.1))
        ps.set_parameters("model", {"w": np.zeros(10)})
        for _ in range(100):
            parameters, version = ps.get_parameters("model")
            ps.accumulate_gradient("model", {"w": gradient_at(parameters["w"])})
        ps.close()

    Every worker makes one, with equal arguments. ``servers`` is how many workers keep the
    parameters, the first workers, or their numbers; servers may compute as well. Each tensor lies
    on one server, by rendezvous hashing of its name. The primary, the first live server, decides
    which gradients count, so that all have the same versions; the bytes go from each worker to each
    server. Calls are services, outside of groups: a lost worker is no error of the others.

    ``mode`` says what becomes of gradients: ``Synchronous()``, ``Asynchronous()`` or
    ``ElasticAveraging()``, or a member of ``AggregationMethod``. ``optimizer`` makes the updates,
    on the server: ``SGD`` (also with momentum; ``SGD(0.01)`` if None) or ``Adam``.

    With ``checkpoint``, a directory of the server's machine, the server writes all its models there
    with hashes, at first and after every ``save_every`` updates, while training goes on. Of several
    servers the first writes there, and worker ``W`` to ``server-W`` in it. If a server starts
    again, all go on from the newest checkpoint that is intact on each; gradients of parameters from
    before that are dropped. ``name`` tells several parameter servers of one job apart.

    In an elastic context (``ctx.elastic``) a call enters the next group when one waits, so that
    lost workers come back; then a server that is lost is waited for. Elsewhere its loss is a
    ServiceLost. With ``reforms=False`` a call that waits raises the GroupError of a group that is
    over, PeerLost if another one waits, for scripts that form groups themselves.

    ``replicas`` is how many of the servers may be lost at a time without a wait, and without the
    loss of a version: each tensor lies on so many more servers. When the primary is lost, the next
    server takes over (primary-backup replication: Budhiraja et al., "The primary-backup approach",
    1993). For elastic contexts.

    Calls wait for other workers at most the context's ``timeout_s``, which is also the time after
    which ``Asynchronous`` waits no more for a worker that has pulled and pushes nothing.

    TypeError or ValueError for arguments that can't be meant; UnknownService if the server does not
    start in time, ConfigurationError on links of other libraries. Cost of a step: the parameters
    once to the worker, a gradient once to the server; the server's memory: parameters, optimizer
    state, a gradient of each worker, each shared among the servers. With ``replicas`` gradients and
    memory ``replicas + 1`` times, and a round trip more between servers for each call.
    """

    take_instead = "take the parameters, ps.get_parameters(name)"

    @hints.arguments(
        hints.PARAMETER_SERVER, hints.PARAMETER_SERVER["world_size"], same=hints.SERVER_SAME
    )
    def __init__(
        self,
        ctx: DistributedContext,
        mode: Mode | AggregationMethod = AggregationMethod.SYNCHRONOUS,
        *,
        optimizer: Optimizer | None = None,
        servers: int | Sequence[int] = 1,
        replicas: int = 0,
        checkpoint: str | os.PathLike[str] | CheckpointStore | None = None,
        save_every: int = 50,
        name: str = "parameters",
        reforms: bool = True,
    ) -> None:
        optimizer = SGD(0.01) if optimizer is None else optimizer
        self.mode = mode_of(mode)
        check_arguments(ctx, self.mode, optimizer, save_every)
        self.ctx = ctx
        self._optimizer = optimizer
        self._servers = servers_of(ctx, servers, replicas)
        check_unused(ctx, "ParameterServer", name)
        self._calls = Calls(ctx, name, self._servers, replicas + 1)
        self._calls.reforms = reforms
        self._pulled: dict[str, tuple[int, int]] = {}
        """By model: version and term of the last pull."""
        self._newest: dict[str, int] = {}
        """By model: the version of the last pull, also without ``wait``."""
        self._counted: dict[str, dict[str, int]] = {}
        """By model: how many gradients of each worker the newest version has."""
        self._unfinished: dict[str, _Push] = {}
        """By model."""
        self._where: dict[str, tuple[tuple[str, ...], list[str]]] = {}
        """By model: the live servers at the last pull, and the names of all tensors."""
        self._after: dict[str, tuple[int, int]] = {}
        """By model: the version that the last push leads to, and its term."""
        self._pushes = itertools.count(secrets.randbits(LIFE_BITS) << LIFE_BITS)
        self._is_closed = False
        self._serving: Serving | None = None
        me = ctx.group.me.worker
        if me in self._servers:
            store = store_of(checkpoint, "" if me == self._servers[0] else me)
            presence = Presence(lambda: ctx.group, ctx.timeout_s)
            replica = Replica(self.mode, optimizer, presence, me, self._servers, replicas + 1)
            self._serving = Serving(ctx, name, replica, store, save_every)
        alike = arguments_of(self.mode, optimizer, self._servers, replicas + 1)
        try:
            self._await(
                lambda wait_s: self._calls.ask("begin_worker", alike, wait_s),
                "the parameter server",
                None,
            )
        except UnknownService as error:
            raise UnknownService(
                f"worker {self._servers[0]}, which is to keep the parameters, made no parameter "
                f"server {name!r} within {ctx.timeout_s:g} s: every worker makes one, with equal "
                f"arguments. {error}"
            ) from error
        note_used(ctx, name)

    # -- parameters

    def set_parameters(
        self, model: str, parameters: Mapping[str, Any], *, replace: bool = False
    ) -> int:
        """Give the first parameters of ``model``, a dict of float arrays or tensors by name;
        returns the version.

        The first call counts. Every worker may make it, also a server that goes on from a
        checkpoint: later calls only compare names and shapes (ValueError if they differ).
        ``replace`` takes the new values as the next version, and forgets the optimizer's state.
        ValueError for complex128 if the server has a ``checkpoint``, which can't hold it.
        """
        arrays = arrays_of(parameters, "parameters")
        for name, array in arrays.items():
            if array.dtype.kind not in "fcV":
                raise TypeError(f"parameters are floats, but {name!r} is {array.dtype}")
        push, layout = next(self._pushes), plain(layout_of(arrays))
        arguments = layout, push, bool(replace)

        def create(wait_s: float) -> dict[str, Any]:
            parts = self._calls.placement(self._calls.present).split(arrays)
            parts = {server: part for server, part in parts.items() if part}
            staging = layout, 0, push, wait_s
            return self._hand_over("create", model, parts, staging, arguments)

        return int(self._await(create, f"setting the parameters of {model!r}", None)["version"])

    def get_parameters(
        self, model: str, *, wait: bool = True, timeout: Duration | None = None
    ) -> Pulled:
        """Pull the newest parameters: one version, never a mixture of two.

        Waits, if this worker has pushed a gradient in a synchronous step, for the update of that
        step; in asynchronous mode until no other worker's parameters would get too old.
        ``wait=False`` returns at once, for evaluation: a gradient must not follow. ServiceTimeout,
        which names the workers that it waited for, after ``timeout`` seconds.
        """
        after = self._after.get(model)

        def pull(wait_s: float) -> dict[str, Any]:
            reply = dict(self._calls.ask("pull", model, after, wait_s, wait))
            if "waits_for" in reply or "tensors" in reply:
                return reply
            names = reply["names"]
            tensors: dict[str, Array] = {}
            sources = self._calls.placement(reply["present"]).sources(names)
            asked = model, reply["version"], reply["term"]
            parts = self._calls.ask_each(
                "fetch", {server: (*asked, its, wait_s) for server, its in sources.items()}
            )
            for part in [self._again()] if parts is None else parts.values():
                if "waits_for" in part:
                    return dict(part)  # and begin again: a server may be lost
                tensors |= part["tensors"]
            return reply | {"tensors": {name: tensors[name] for name in names}}

        reply = self._await(pull, f"the parameters of {model!r}", timeout)
        version = int(reply["version"])
        self._note_version(model, version)
        self._counted[model] = reply["counted"]
        if wait:
            self._pulled[model] = version, int(reply["term"])
            self._where[model] = tuple(reply["present"]), list(reply["tensors"])
        return Pulled(reply["tensors"], version)

    # -- gradients

    def accumulate_gradient(
        self,
        model: str,
        gradient: Mapping[str, Any],
        worker_rank: int | None = None,
        *,
        step: int | None = None,
        timeout: Duration | None = None,
    ) -> bool:
        """Push a gradient: arrays or tensors with the names and shapes of the parameters.

        Returns whether it counts. False: it was late (``backup_workers``), or its parameters are
        from before a restart of the server, or were pulled longer ago than the context's timeout;
        it is dropped and counted in ``stats``. Pull and go on. In asynchronous mode the call waits
        until the gradient is applied.

        ``step`` is the version that it was computed on, by default the version of the last pull.
        ``worker_rank``, if given, must be this worker's rank. ValueError for a gradient of another
        step, a second one in a step, unknown or missing names, other shapes, NaN or infinity.
        """
        if worker_rank is not None and worker_rank != self.ctx.rank:
            raise ValueError(
                f"worker_rank is {worker_rank!r:.60}, but the rank of this worker is "
                f"{self.ctx.rank}: every worker pushes its own gradient"
            )
        if self.mode.of == "parameters":
            raise ValueError("elastic averaging of parameters takes average_parameters")
        return self._push(model, arrays_of(gradient, "a gradient"), step, timeout)

    def finish_gradient(self, model: str, *, timeout: Duration | None = None) -> bool | None:
        """Finish a gradient whose ``accumulate_gradient`` was interrupted, as by the loss of a
        group, so that its outcome is unknown. Returns whether it counts; None if there is no such
        gradient.

        The server knows a gradient by its number, so it counts once at most. It does not count if
        its step is over.
        """
        if model not in self._unfinished:
            return None
        try:
            return self._finish(model, timeout)
        except ValueError as error:
            _log.warning("an interrupted gradient of %r does not count: %s", model, error)
            return False

    def counted(self, model: str) -> dict[str, int]:
        """How many gradients of each worker are in the parameters of the last pull."""
        return dict(self._counted.get(model, {}))

    def average_parameters(
        self, model: str, parameters: Mapping[str, Any], *, timeout: Duration | None = None
    ) -> dict[str, Array]:
        """Move this worker's ``parameters`` and the server's towards each other, by ``alpha`` of
        their difference; returns this worker's. For ``ElasticAveraging(of="parameters")``;
        ValueError in other modes.

        Cost: the parameters once to the worker, once to the server.
        """
        if self.mode.of != "parameters":
            raise ValueError('average_parameters is for ElasticAveraging(of="parameters")')
        mine = arrays_of(parameters, "parameters")
        center = self.get_parameters(model, timeout=timeout).parameters
        if mine.keys() != center.keys() or any(
            mine[name].shape != center[name].shape for name in mine
        ):
            raise ValueError(f"the parameters given do not fit {model!r} on the server")
        moves = {  # NumPy's scalars, of tensors without dimensions, become arrays again
            name: np.asarray(center[name].dtype.type(self.mode.alpha) * (mine[name] - center[name]))
            for name in center
        }
        # Not counted after a restart of the server: then only this worker moves.
        self._push(model, moves, None, timeout)
        return {name: np.asarray(mine[name] - moves[name]) for name in mine}

    # -- updates by hand

    def ready(self, model: str | None = None) -> bool:
        """Whether the gradients of the present step are there, so that ``apply_gradients`` can make
        its update. Without ``model``: of the only one. ValueError if the server makes the updates
        itself, as it does in all modes but ``Synchronous(automatic=False)``."""
        self._check_by_hand("ready")
        if model is None:
            if len(self._pulled) != 1:
                raise ValueError(f"ready of which model? Pulled were: {sorted(self._pulled)}")
            model = next(iter(self._pulled))
        return bool(self._calls.ask("ready", model))

    def apply_gradients(self, model: str, learning_rate: float | None = None) -> int:
        """Make the update of the step of this worker's last pull, unless another worker has;
        returns the version after it. At the optimizer's learning rate, or ``learning_rate``.
        ValueError if gradients are missing, and where ``ready`` has it."""
        self._check_by_hand("apply_gradients")
        if learning_rate is not None:
            check_number("learning_rate", learning_rate)
        return int(self._calls.ask("apply", model, self._known(model)[0], learning_rate))

    def clear_gradients(self, model: str) -> None:
        """Drop the gradients of the step of this worker's last pull, unless its update was made."""
        self._calls.ask("clear", model, self._known(model)[0])
        self._after.pop(model, None)

    # -- the rest

    @property
    def reforms(self) -> bool:
        """Whether calls enter the next group of an elastic context."""
        return self._calls.reforms

    @reforms.setter
    def reforms(self, reforms: bool) -> None:
        self._calls.reforms = reforms

    def stats(self) -> dict[str, dict[str, int]]:
        """By model: ``version``, gradients ``counted``, and dropped ones by reason: ``late``,
        ``restarted`` (the server), ``expired``, ``cleared``, ``replaced``; ``max staleness``."""
        found: dict[str, dict[str, int]] = self._calls.ask("stats")
        return found

    def save(self) -> None:
        """Write a checkpoint now: on the server; elsewhere nothing happens. CheckpointError if it
        can't be written, ValueError without a directory, RuntimeError after ``close``."""
        self._calls.check_open()
        if self._serving is not None:
            self._serving.save()

    def close(self, *, timeout: Duration | None = None) -> None:
        """Say that this worker calls no more. On the server: wait until all have, then write the
        last checkpoint.

        A worker that is silent for the context's ``timeout_s`` is not waited for. ``timeout``
        bounds the wait; without it the wait ends with the last worker. Idempotent; nothing in a
        forked child. CheckpointError if the last checkpoint can't be written.
        """
        if self._is_closed or not self._calls.owner.is_here:
            return
        self._is_closed = self._calls.has_ended = True
        seconds = None if timeout is None else checked_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        self._leave()
        if self._serving is not None:
            self._serving.close(deadline, self._leave, self._calls.reform_if_due)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()

    # -- inside

    def _push(
        self, model: str, arrays: dict[str, Array], step: int | None, timeout: Duration | None
    ) -> bool:
        version, term = self._known(model)
        step = version if step is None else step
        self._unfinished[model] = _Push(arrays, step, next(self._pushes), term)
        return self._finish(model, timeout)

    def _finish(self, model: str, timeout: Duration | None) -> bool:
        try:
            counted = self._ask_to_count(model, self._unfinished[model], timeout)
        except (ValueError, TypeError):  # a mistake: it counts never
            del self._unfinished[model]
            raise
        del self._unfinished[model]
        return counted

    def _ask_to_count(self, model: str, push: _Push, timeout: Duration | None) -> bool:
        arrays, step, number, term = push

        def hand_over(wait_s: float) -> dict[str, Any]:
            parts, staging = self._parts_of(model, arrays), (None, step, number, wait_s)
            return self._hand_over("push", model, parts, staging, (step, number, term), timeout)

        reply = self._await(hand_over, f"room for a gradient of {model!r}", timeout)
        if self.mode.is_by_step:
            if reply.get("counted", True):  # or waits for other workers
                self._after[model] = step + 1, term
                return True
            self._after.pop(model, None)
            return False
        if not reply:
            reply = self._await(
                lambda wait_s: self._calls.ask("outcome", model, number, term, wait_s),
                f"the update by a gradient of {model!r}",
                timeout,
            )
        return bool(reply["counted"])

    def _check_by_hand(self, method: str) -> None:
        """ValueError if the server makes the updates itself: else a script that waits for ``ready``
        never applies, and its learning rate has no effect."""
        if not self.mode.is_by_hand:
            raise ValueError(
                f"{method} is for updates by the script, mode=Synchronous(automatic=False); this "
                f"server makes them itself, by {self._optimizer!r}: leave it out, and give the "
                "learning rate to the optimizer, optimizer=SGD(0.01)"
            )

    def _note_version(self, model: str, version: int) -> None:
        before = self._newest.get(model, version)
        self._newest[model] = version
        if version < before:
            _log.warning(
                "the parameters of %r went back from version %d to %d: the servers that had newer "
                "ones are lost, and the others went on from what they have",
                model,
                before,
                version,
            )

    def _known(self, model: str) -> tuple[int, int]:
        known = self._pulled.get(model)
        if known is None:
            raise ValueError(f"get_parameters({model!r}) comes before a gradient of it")
        return known

    def _await(
        self, ask: Callable[[float], dict[str, Any]], what: str, timeout: Duration | None
    ) -> dict[str, Any]:
        """The reply of a call that waits on the server for other workers."""
        seconds = self.ctx.timeout_s if timeout is None else checked_seconds(timeout)
        return await_reply(ask, what, seconds, self._calls.reform_if_due)

    def _hand_over(
        self,
        method: str,
        model: str,
        parts: Mapping[str, dict[str, Array]],
        staging: tuple[Any, int, int, float],
        arguments: tuple[Any, ...],
        timeout: Duration | None = None,
    ) -> dict[str, Any]:
        """Hand the servers their ``parts`` of a push, and have the primary decide by ``method``:
        its reply, or what a server waits for. Several servers stage their parts first, by
        ``staging``: layout, step, number, seconds to wait. One server gets its part with the call
        of ``method``, whose ``arguments`` follow the tensors."""
        tensors, terms = None, {}
        if len(self._servers) == 1:
            (tensors,) = parts.values()
        else:
            each = {server: (model, part, *staging) for server, part in parts.items()}
            try:
                replies = self._calls.ask_each("stage", each)
            except (ValueError, TypeError):  # of one server: the others have staged theirs
                self._calls.ask("abandon", model, staging[2])
                raise
            for reply in [self._again()] if replies is None else replies.values():
                if "waits_for" in reply:
                    return dict(reply)
            terms = {server: reply["term"] for server, reply in (replies or {}).items()}
        reply = self._calls.ask(method, model, tensors, *arguments, terms, timeout=timeout)
        return self._again() if reply is None else dict(reply)

    def _again(self) -> dict[str, Any]:
        """The live servers have changed: the call begins again, in the next group perhaps."""
        time.sleep(_PAUSE_S)
        return {"waits_for": "a server that was lost, or began anew"}

    def _parts_of(self, model: str, arrays: dict[str, Array]) -> dict[str, dict[str, Array]]:
        """The gradient split by server; a server without a part of it gets an empty part, so that
        it can report missing names."""
        present, names = self._where[model]
        placement = self._calls.placement(present)
        have = placement.split(dict.fromkeys(names))
        parts = placement.split(arrays)
        return {server: part for server, part in parts.items() if part or have[server]}

    def _leave(self) -> bool:
        """Say that this worker calls no more; False if the primary has ended."""
        # A lost primary waits for nobody; a late one writes a checkpoint, and hears the call then.
        try:
            self._calls.ask("leave", timeout=min(self.ctx.timeout_s, _LEAVE_S))
        except ServiceLost:
            return False
        except (ServiceTimeout, UnknownService):
            pass
        return True
