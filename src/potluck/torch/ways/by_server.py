"""PARAMETER_SERVER: one worker keeps the parameters, and all push gradients to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from potluck.parameter_server import Adam, ParameterServer
from potluck.parameter_server.model import Mode
from potluck.torch.parameter_server import ServerOptimizer
from potluck.torch.structure import broadcast_tensors, tensors_of
from potluck.torch.ways import way
from potluck.training.sampler import Batch, Schedule, Share
from potluck.training.transfer import gather_states

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_PATIENCE_S = 3600.0
"""How long the others wait for the slowest rank at the end of an epoch."""

_MOST_DROPPED = 4

_numbers: WeakKeyDictionary[DistributedContext, int] = WeakKeyDictionary()
"""By context: the number of the next parameter server of a trainer."""


class ByServer(way.Way):
    """Each step of the loop is an epoch, in which ranks only call the server. So no rank waits for
    another one but in a synchronous step. At the end of the epoch all pull the same parameters.

    A lost rank ends the step early: the others form the next group, and go on with the epoch where
    they were. A push that this interrupts is finished first, under the number that it had. If the
    lost rank kept the parameters, rank 0 of the next group keeps them from then on, in the newest
    version that a rank has pulled; the optimizer's moments begin anew. Then what counts is what
    that version contains, so ranks push again what it has not. (Elastic averaging of parameters has
    no pushes to count: there the ranks go on from those of one rank.)
    """

    def __init__(self, recipe: way.Recipe, mode: Mode) -> None:
        super().__init__(recipe)
        self.model = recipe.network
        self.optimizer: Optimizer | None = None
        if mode.of == "parameters":
            self.optimizer = recipe.optimizer(recipe.network)
        self._mode = mode
        self._ps: ParameterServer | None = None
        self._server: ServerOptimizer | None = None
        self._number = -1  # of the server
        self._host = ""  # the worker that runs it
        self._is_set = False  # by the script, since the parameters were last sent to the server
        self._is_closed = False
        # Of the present epoch:
        self._num_parts = 0  # 0 before it has begun
        self._first = 0  # the version at its begin
        self._has_tried = False  # to begin it with the others
        self._done = 0  # the parts of this rank that count
        self._before: int | None = None  # its pushes that counted before, once it has pulled
        self._earlier: dict[str, int] = {}  # by worker, pushes that earlier servers counted
        self._sum, self._num = 0.0, 0
        self._num_dropped = 0  # in a row

    def train(self, call: way.TrainCall) -> None:
        samples, problem = call.samples, ""
        self._begin_epoch()
        # Parameters that this rank has set go to all in _follow.
        job = way.epoch_loop(self.recipe, call, is_kept=lambda: self._is_set)
        for share in job:
            with job.step():
                problem = self._prepare(samples, job.schedule)
                if problem:
                    job.stop()
                    continue
                self._compute(samples, job.schedule, share.epoch)
                self._pull_together()
                local = self._sum / self._num if self._num else math.nan
                job.commit(loss=local)
                call.on_epoch(way.EpochEnd(share.epoch, job.last_loss, local, self._num))
                self._begin_epoch()
        if problem:
            raise ValueError(problem)

    def note_set(self) -> None:
        self._is_set = True

    def check_open(self) -> None:
        if self._is_closed and self._ps is not None:
            self._ps.stats()

    def close(self) -> None:
        self._is_closed = True
        if self._ps is not None:
            self._ps.reforms = True
            self._ps.close()

    # ------------------------------------------------------------ inside

    def _begin_epoch(self) -> None:
        self._num_parts = self._first = self._done = 0
        self._before, self._has_tried = None, False
        self._sum, self._num = 0.0, 0

    @property
    def _counted(self) -> dict[str, int]:
        """By worker, its pushes that are in this rank's parameters."""
        counted = Counter(self._earlier)
        if self._server is not None:
            counted.update(self._server.counted)
        return dict(counted)

    def _prepare(self, samples: way.TrainerSamples, schedule: Schedule) -> str:
        """The ranks of the group agree on the server, and on where they are in the epoch. Returns
        why the samples of a rank can't be trained on, empty if all can. Collective."""
        ctx, reason = self.recipe.ctx, ""
        is_new, self._has_tried = not self._has_tried, True
        try:
            samples.check(self.recipe.sizes, ctx.rank)
        except (ValueError, TypeError) as error:
            reason = str(error)
        mine = {
            "reason": reason,
            "is_set": self._is_set,
            "hosts": self._ps is not None and self._host == ctx.group.me.worker,
            "number": self._number,
            "next": _numbers.get(ctx, 0),
            "num_parts": self._num_parts,
            "first": self._first,
            "done": self._done,
            "before": self._before,
            "counted": self._counted,
            "earlier": self._earlier,
            "version": 0 if self._server is None else self._server.version,
        }
        rows: list[dict[str, Any]] = gather_states(ctx, mine)
        for rank, row in enumerate(rows):
            if row["reason"]:
                return f"the samples of {ctx.group.describe(rank)}: {row['reason']}"
        begun = [rank for rank, row in enumerate(rows) if row["num_parts"]]
        hosts = [rank for rank, row in enumerate(rows) if row["hosts"]]
        newest = max(begun, key=lambda r: rows[r]["version"] - rows[r]["first"], default=0)
        if begun:  # else this is the first of its groups
            self._num_parts, self._first = rows[newest]["num_parts"], rows[newest]["first"]
            if is_new:
                self._done = min(rows[rank]["done"] for rank in begun)
        else:
            num = schedule.num_samples
            most = max(schedule.counts([(0, num)], ctx.world_size))
            self._num_parts = max(1, min(math.ceil(num / self.recipe.batch_size), most))
            # Not what this rank pulls, for others may have pushed by then.
            self._first = rows[hosts[0]]["version"] if hosts else 0
        self._follow(rows, hosts, newest)
        return ""

    def _follow(self, rows: list[dict[str, Any]], hosts: list[int], newest: int) -> None:
        """Use the server that a rank in ``hosts`` runs, or make one, of the parameters of rank
        ``newest``. Parameters that ranks have set become all ranks', and the epoch begins with
        them; of several such ranks the first counts."""
        recipe, ctx = self.recipe, self.recipe.ctx
        setters = [rank for rank, row in enumerate(rows) if row["is_set"]]
        if setters or not hosts:
            # Into copies first: if this is interrupted, a rank's parameters are of the version that
            # it reports.
            own = tensors_of(recipe.network)
            copies = {name: each.detach().clone() for name, each in own.items()}
            broadcast_tensors(ctx, copies, root=[*setters, newest][0])
            with torch.no_grad():
                for name, each in own.items():
                    each.copy_(copies[name])
        if not hosts:  # from here on this rank speaks of these parameters
            row, self._ps, self._server = rows[newest], None, None
            self._first -= row["version"]
            self._earlier = row["counted"]
            if self._before is not None:
                self._done = self._earlier.get(ctx.group.me.worker, 0) - self._before
        number = rows[hosts[0]]["number"] if hosts else max(row["next"] for row in rows)
        if number != self._number or self._ps is None:
            host = ctx.members[hosts[0] if hosts else 0].worker
            _numbers[ctx] = number + 1
            self._ps = ParameterServer(
                ctx,
                self._mode,
                optimizer=Adam(recipe.learning_rate),
                servers=[host],  # type: ignore[list-item]
                name=f"trainer {number}",
                reforms=False,  # the loop does
            )
            self._host, self._number, self._server = host, number, None
            if hosts:
                self._earlier = rows[hosts[0]]["earlier"]
        if self._server is None:
            network, optimizer = recipe.network, self.optimizer
            self._server = ServerOptimizer(network, self._ps, optimizer=optimizer)
        elif setters:
            if ctx.rank == hosts[0]:
                self._server.replace()
            ctx.barrier()
            self._server.look()
            ctx.barrier()
            self._first, self._done, self._before = self._server.version, 0, None
        self._is_set = False

    def _compute(self, samples: way.TrainerSamples, schedule: Schedule, epoch: int) -> None:
        """The parts of the epoch that are left."""
        server = self._server
        assert server is not None
        self.model.train()
        if self.optimizer is None and server.finish():
            self._done += 1
        while self._mode.is_by_step or self._done < self._num_parts:
            if self.optimizer is None:
                server.pull()
            if self._before is None:
                self._before = self._counted.get(self.recipe.ctx.group.me.worker, 0) - self._done
            if self._mode.is_by_step:
                self._done = server.version - self._first  # all ranks push in every step
                if self._done >= self._num_parts:
                    break
            upcoming = partial(self._after, schedule, epoch, self._done)
            self._push(samples, self._share(schedule, epoch, self._done), upcoming)

    def _share(self, schedule: Schedule, epoch: int, number: int) -> Share:
        """This rank's share of a part of an epoch."""
        start, stop = way.part_of_epoch(schedule, number, self._num_parts)
        ctx = self.recipe.ctx
        return schedule.share(Batch(epoch, start, stop - start), ctx.rank, ctx.world_size)

    def _after(self, schedule: Schedule, epoch: int, number: int) -> Iterator[way.Part]:
        """This rank's samples after those of a part, if nothing changes."""
        for each in range(epoch * self._num_parts + number + 1, schedule.epochs * self._num_parts):
            share = self._share(schedule, *divmod(each, self._num_parts))
            yield share.epoch, share.indices[: share.num_samples]

    def _push(
        self, samples: way.TrainerSamples, share: Share, upcoming: Callable[[], Iterator[way.Part]]
    ) -> None:
        """Compute on the samples of ``share``, and push the gradient, with a weight that is 1 on
        average over the ranks."""
        server, recipe = self._server, self.recipe
        assert server is not None
        server.zero_grad()
        if share.num_samples:
            inputs, targets = samples.load(share.indices, share.epoch, upcoming)
            with recipe.precision():
                loss = recipe.loss(self.model(inputs), targets)
            where = f"step {self._done} of epoch {share.epoch}"
            recipe.check_loss(loss.item(), where)
            weight = share.weight * recipe.ctx.world_size if self.optimizer is None else 1.0
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            self._sum += loss.item() * share.num_samples
            self._num += share.num_samples
        if self.optimizer is None:
            counted = server.push()
            self._done += counted
            self._num_dropped = 0 if counted else self._num_dropped + 1
            if self._num_dropped >= _MOST_DROPPED and not self._mode.is_by_step:
                raise RuntimeError(
                    f"{self._num_dropped} gradients of rank {recipe.ctx.rank} in a row came too "
                    f"late to count: a step may take {recipe.ctx.timeout_s:g} s; pass potluck.init "
                    "a longer timeout, or take a smaller batch_size"
                )
            return
        self._done += 1
        if share.num_samples:
            server.step()

    def _pull_together(self) -> None:
        """The newest parameters, when all ranks have pushed all of theirs."""
        server, ctx = self._server, self.recipe.ctx
        assert server is not None
        ctx.barrier(timeout=_PATIENCE_S)
        server.look()
        broadcast_tensors(ctx, dict(self.model.named_buffers()))
