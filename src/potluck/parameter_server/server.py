"""``ParameterServer``: what a script holds of a parameter server, on every worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from potluck.checkpoint import CheckpointStore
from potluck.context import DistributedContext
from potluck.errors import HandlerError, ServiceLost, ServiceTimeout, UnknownService
from potluck.parameter_server.host import Host
from potluck.parameter_server.model import LIFE_BITS
from potluck.parameter_server.modes import (
    AggregationMethod,
    ElasticAveraging,
    Mode,
    Synchronous,
)
from potluck.parameter_server.offer import NotInGroup, Offer
from potluck.parameter_server.optimizers import SGD, Array, Optimizer
from potluck.services import Remote, service
from potluck.services.asking import SLICE_S, await_reply, raise_local
from potluck.services.presence import Presence
from potluck.waiting import Reminder, checked_seconds
from potluck.wire.tensors import host_bytes, is_tensor

_PAUSE_S = 0.05
_LEAVE_S = 5.0


class Pulled(NamedTuple):
    """One version of a model's parameters: arrays by name, which are the caller's own.

    ``version`` counts the updates before it.
    """

    parameters: dict[str, Array]
    version: int


class ParameterServer:
    """Parameters that one worker keeps, and all workers pull and push gradients for.

        ps = potluck.ParameterServer(ctx, optimizer=SGD(0.1))
        ps.set_parameters("model", {"w": np.zeros(10)})
        for _ in range(100):
            parameters, version = ps.get_parameters("model")
            ps.accumulate_gradient("model", {"w": gradient_at(parameters["w"])})
        ps.close()

    Every worker makes one, with equal arguments. The worker whose number is ``server`` keeps the
    parameters; it may compute as well. Calls are services, outside of groups: a lost worker is no
    error of the others.

    ``mode`` says what becomes of gradients: ``Synchronous()``, ``Asynchronous()`` or
    ``ElasticAveraging()``, or a member of ``AggregationMethod``. ``optimizer`` makes the updates,
    on the server: ``SGD`` (also with momentum; ``SGD(0.01)`` if None) or ``Adam``.

    With ``checkpoint``, a directory of the server's machine, the server writes all its models there
    with hashes, at first and after every ``save_every`` updates, while training goes on. A server
    that starts again goes on from the newest checkpoint that is intact; gradients that were
    computed on parameters of before are dropped. ``name`` tells several parameter servers of one
    job apart.

    In an elastic context (``ctx.elastic``) a call enters the next group when one waits, so that
    lost workers come back; then a server that is lost is waited for. Elsewhere its loss is a
    ServiceLost.

    Calls wait for other workers at most the context's ``timeout_s``, which is also the time after
    which ``Asynchronous`` waits no more for a worker that has pulled and pushes nothing.

    TypeError or ValueError for arguments that can't be meant; UnknownService if the server does not
    start in time, ConfigurationError on links of other libraries. Cost of a step: the parameters
    once to the worker, a gradient once to the server; the server's memory: parameters, optimizer
    state, a gradient of each worker.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        mode: Mode | AggregationMethod = AggregationMethod.SYNCHRONOUS,
        *,
        optimizer: Optimizer | None = None,
        server: int = 0,
        checkpoint: str | os.PathLike[str] | CheckpointStore | None = None,
        save_every: int = 50,
        name: str = "parameters",
    ) -> None:
        mode = mode.value if isinstance(mode, AggregationMethod) else mode
        optimizer = SGD(0.01) if optimizer is None else optimizer
        _check(ctx, mode, optimizer, save_every)
        self.ctx = ctx
        self.mode: Mode = mode
        self._name = name
        self._worker = str(server)
        self._pulled: dict[str, tuple[int, int]] = {}
        """By model: version and incarnation of the last pull."""
        self._after: dict[str, tuple[int, int]] = {}
        """By model: the version that the last push leads to, and its incarnation."""
        self._pushes = itertools.count(secrets.randbits(LIFE_BITS) << LIFE_BITS)
        self._is_closed = False
        self._host: Host | None = None
        if ctx.group.rank_of(self._worker) < 0:
            there = ", ".join(member.worker for member in ctx.members)
            raise ValueError(f"server={server!r}: there is no such worker; there are: {there}")
        if ctx.group.me.worker == self._worker:
            if checkpoint is not None and not isinstance(checkpoint, CheckpointStore):
                checkpoint = CheckpointStore(Path(checkpoint))
            presence = Presence(lambda: ctx.group, ctx.timeout_s)
            self._host = Host(
                mode,
                optimizer,
                presence,
                store=checkpoint,
                save_every=save_every,
                worker_timeout_s=ctx.timeout_s,
            )
            offer = Offer(self._host)
            ctx.serve(service(name, concurrent=True, before=presence.hear)(offer))
        self._remote: Remote = ctx.connect(name, rank=ctx.group.rank_of(self._worker))
        self._ask("agree", repr(mode), repr(optimizer))

    # -- parameters

    def set_parameters(
        self, model: str, parameters: Mapping[str, Any], *, replace: bool = False
    ) -> int:
        """Give the first parameters of ``model``, a dict of float arrays or tensors by name;
        returns the version.

        The first call counts. Every worker may make it, also a server that goes on from a
        checkpoint: later calls only compare names and shapes (ValueError if they differ).
        ``replace`` takes the new values as the next version, and forgets what the optimizer kept.
        """
        arrays = _arrays(parameters, "parameters")
        for name, array in arrays.items():
            if array.dtype.kind not in "fcV":
                raise TypeError(f"parameters are floats, but {name!r} is {array.dtype}")
        version = self._ask("create", model, arrays, next(self._pushes), bool(replace))
        return int(version)

    def get_parameters(
        self, model: str, *, wait: bool = True, timeout: float | None = None
    ) -> Pulled:
        """Pull the newest parameters: one version, never a mixture of two.

        Waits, if this worker has pushed a gradient in a synchronous step, for the update of that
        step; in asynchronous mode until no other worker's parameters would get too old.
        ``wait=False`` returns at once, for evaluation: a gradient must not follow. ServiceTimeout,
        which names the workers that it waited for, after ``timeout`` seconds.
        """
        after = self._after.get(model)
        reply = self._await(
            lambda wait_s: self._ask("pull", model, after, wait_s, wait),
            f"the parameters of {model!r}",
            timeout,
        )
        version = int(reply["version"])
        if wait:
            self._pulled[model] = version, int(reply["incarnation"])
        return Pulled(reply["tensors"], version)

    # -- gradients

    def accumulate_gradient(
        self,
        model: str,
        gradient: Mapping[str, Any],
        *,
        step: int | None = None,
        worker_rank: int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Push a gradient: arrays or tensors with the names and shapes of the parameters.

        Returns whether it counts. False: it was late (``backup_workers``), or its parameters are of
        before a restart of the server, or were pulled longer ago than the context's timeout; it is
        dropped and counted in ``stats``. Pull and go on. In asynchronous mode the call waits until
        the gradient is applied.

        ``step`` is the version that it was computed on, by default that of the last pull.
        ``worker_rank``, if given, must be this worker's rank. ValueError for a gradient of another
        step, a second one in a step, unknown or missing names, other shapes, NaN or infinity.
        """
        if worker_rank is not None and worker_rank != self.ctx.rank:
            raise ValueError(f"worker_rank is {worker_rank}, but this worker has {self.ctx.rank}")
        if isinstance(self.mode, ElasticAveraging) and self.mode.of == "parameters":
            raise ValueError("elastic averaging of parameters takes average_parameters")
        return self._push(model, _arrays(gradient, "a gradient"), step, timeout)

    def average_parameters(
        self, model: str, parameters: Mapping[str, Any], *, timeout: float | None = None
    ) -> dict[str, Array]:
        """Move this worker's ``parameters`` and the server's towards each other, by ``alpha`` of
        their difference; returns this worker's. For ``ElasticAveraging(of="parameters")``;
        ValueError in other modes.

        Cost: the parameters once to the worker, once to the server.
        """
        if not isinstance(self.mode, ElasticAveraging) or self.mode.of != "parameters":
            raise ValueError('average_parameters is for ElasticAveraging(of="parameters")')
        mine = _arrays(parameters, "parameters")
        center = self.get_parameters(model, timeout=timeout).parameters
        if mine.keys() != center.keys() or any(
            mine[name].shape != center[name].shape for name in mine
        ):
            raise ValueError(f"the parameters given are not those of {model!r} on the server")
        moves = {
            name: center[name].dtype.type(self.mode.alpha) * (mine[name] - center[name])
            for name in center
        }
        # Not counted after a restart of the server: then only this worker moves, to what it keeps.
        self._push(model, moves, None, timeout)
        return {name: mine[name] - moves[name] for name in mine}

    # -- updates by hand

    def ready(self, model: str) -> bool:
        """Whether the gradients of the present step are there, so that ``apply_gradients`` can make
        its update. Always False with ``automatic``, and in other modes than ``Synchronous``."""
        return bool(self._ask("ready", model))

    def apply_gradients(self, model: str, *, learning_rate: float | None = None) -> int:
        """Make the update of the step of this worker's last pull, unless another worker has;
        returns the version after it. At the optimizer's learning rate, or ``learning_rate``.
        ValueError if gradients are missing, and in other modes than ``Synchronous``."""
        return int(self._ask("apply", model, self._step_of(model), learning_rate))

    def clear_gradients(self, model: str) -> None:
        """Drop the gradients of the step of this worker's last pull, unless its update was made."""
        self._ask("clear", model, self._step_of(model))
        self._after.pop(model, None)

    # -- the rest

    def stats(self) -> dict[str, dict[str, int]]:
        """By model: ``version``, gradients ``counted``, and dropped ones by reason: ``late``,
        ``restarted`` (the server), ``expired``, ``cleared``, ``replaced``; ``max staleness``."""
        found: dict[str, dict[str, int]] = self._ask("stats")
        return found

    def save(self) -> None:
        """Write a checkpoint now: on the server; elsewhere nothing happens. CheckpointError if it
        can't be written, ValueError without a directory."""
        if self._host is not None:
            self._host.save()

    def close(self, *, timeout: float | None = None) -> None:
        """Say that this worker calls no more. On the server: wait until all have, then write the
        last checkpoint.

        A worker that is silent for the context's ``timeout_s`` is not waited for. ``timeout``
        bounds the wait; without it the wait ends with the last worker. Idempotent. CheckpointError
        if the last checkpoint can't be written.
        """
        if self._is_closed:
            return
        self._is_closed = True
        # Lost: it has ended, and waits for nobody. Late: it writes a checkpoint, and hears it then.
        with contextlib.suppress(ServiceLost, ServiceTimeout):
            self._ask("leave", timeout=min(self.ctx.timeout_s, _LEAVE_S))
        if self._host is None:
            return
        seconds = None if timeout is None else checked_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        self._await_others(self._host, deadline)
        self._host.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()

    # -- inside

    def _push(
        self, model: str, arrays: dict[str, Array], step: int | None, timeout: float | None
    ) -> bool:
        version, incarnation = self._known(model)
        step = version if step is None else step
        push = next(self._pushes)
        reply = self._ask("push", model, arrays, step, push, incarnation, timeout=timeout)
        if isinstance(self.mode, Synchronous):
            if reply is None or reply["counted"]:
                self._after[model] = step + 1, incarnation
                return True
            self._after.pop(model, None)
            return False
        if reply is None:
            reply = self._await(
                lambda wait_s: self._ask("outcome", model, push, wait_s),
                f"the update by a gradient of {model!r}",
                timeout,
            )
        return bool(reply["counted"])

    def _known(self, model: str) -> tuple[int, int]:
        known = self._pulled.get(model)
        if known is None:
            raise ValueError(f"get_parameters({model!r}) comes before a gradient of it")
        return known

    def _step_of(self, model: str) -> int:
        return self._known(model)[0]

    def _await(
        self, ask: Callable[[float], dict[str, Any]], what: str, timeout: float | None
    ) -> dict[str, Any]:
        """The reply of a call that waits for other workers on the server."""
        seconds = self.ctx.timeout_s if timeout is None else checked_seconds(timeout)
        return await_reply(ask, what, seconds, self._reform_if_due)

    def _ask(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """One call of the server. What it raises for a mistake of this script is raised here."""
        seconds = self.ctx.timeout_s if timeout is None else checked_seconds(timeout)
        deadline = time.monotonic() + seconds
        while True:
            try:
                return getattr(self._remote, method)(*args, timeout=timeout)
            except HandlerError as error:
                if error.type != NotInGroup.__name__ or time.monotonic() >= deadline:
                    raise_local(error)
                time.sleep(_PAUSE_S)
                self._reform_if_due()
            except UnknownService:  # it was started again, and does not serve yet
                if not self.ctx.elastic or time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)
            except ServiceLost:
                # Every call may be made twice: pushes have numbers, all others change nothing then.
                if not self._enter_next_group(deadline):
                    raise

    def _enter_next_group(self, deadline: float) -> bool:
        """Wait for a group in which the server may be back; False without one by ``deadline``."""
        while self.ctx.elastic and time.monotonic() < deadline:
            if self._reform_if_due():
                return True
            time.sleep(_PAUSE_S)
        return False

    def _reform_if_due(self) -> bool:
        if not self.ctx.elastic or not self.ctx.reform_due:
            return False
        self.ctx.reform(self.ctx.communicator.error)
        return True

    def _await_others(self, host: Host, deadline: float | None) -> None:
        me = self.ctx.group.me.worker
        rest: list[str] = []
        reminder = Reminder(
            lambda: f"the parameter server waits for worker {', '.join(rest)} to end", deadline
        )
        while True:
            until = time.monotonic() + SLICE_S
            rest = host.await_others(me, until if deadline is None else min(until, deadline))
            if not rest or (deadline is not None and time.monotonic() >= deadline):
                return
            self._reform_if_due()  # a worker that was killed meanwhile comes back
            reminder.tick()


def _check(ctx: Any, mode: Any, optimizer: Any, save_every: Any) -> None:
    if not hasattr(ctx, "connect"):
        raise TypeError(f"ParameterServer takes a context, potluck.init(), not {ctx!r}")
    if not isinstance(mode, Mode):
        raise TypeError(
            f"mode is {mode!r}; it must be Synchronous(), Asynchronous() or ElasticAveraging() of "
            "potluck.parameter_server"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r}; it must be SGD(...) or Adam(...) of "
            "potluck.parameter_server: it runs on the server"
        )
    if isinstance(mode, Synchronous) and mode.backup_workers >= ctx.world_size:
        raise ValueError(
            f"backup_workers is {mode.backup_workers} of {ctx.world_size} workers: no gradient "
            "would count"
        )
    if not isinstance(save_every, int) or save_every < 1:
        raise ValueError(f"save_every is {save_every!r}; it must be an int of at least 1")


def _arrays(given: Any, what: str) -> dict[str, Array]:
    """``given`` as arrays of the host; a tensor of torch without a copy, if it is there."""
    if not isinstance(given, Mapping) or not given:
        raise TypeError(f"{what} is a dict of arrays by name, with at least one, not {given!r:.80}")
    found = {}
    for name, each in given.items():
        if not isinstance(name, str):
            raise TypeError(f"{what} has the name {name!r:.60}, which is no str")
        array = _of_tensor(each) if is_tensor(each) else np.asarray(each)
        if array.dtype.kind not in "fciubV":
            raise TypeError(f"{what} has {name!r} of dtype {array.dtype}; it must be numbers")
        found[name] = array
    return found


def _of_tensor(tensor: Any) -> Array:
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return host_bytes(tensor).view(dtype).reshape(tuple(tensor.shape))
