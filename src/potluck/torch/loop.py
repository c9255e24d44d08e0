"""The elastic training loop for PyTorch: ``training/elastic.py`` for modules and optimizers."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from traceback import walk_tb
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from potluck._core.checks import checked_whole
from potluck._core.context import DistributedContext, init
from potluck._core.room import own_room
from potluck.checkpoint.store import CheckpointStore
from potluck.data.shards import ShardedDataset
from potluck.torch.amp import GradScaler
from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.intercept import Capture, GradientInterceptor
from potluck.torch.loading import Loader, check_samples, schedule_of, stream_of
from potluck.torch.outer import OuterStrategy, outer_of
from potluck.torch.planning import Planned, Planning, Rehearsal, Suggestion, is_planning
from potluck.torch.reducer import Reducer
from potluck.torch.replica import TorchReplica
from potluck.torch.room import StepMemory
from potluck.torch.structure import broadcast_tensors
from potluck.training import elastic
from potluck.training.memory import Parts
from potluck.training.noise import unbiased
from potluck.training.policy import Policy
from potluck.training.sampler import STREAM, Batch, Share
from potluck.training.strategies import Strategy


class ElasticLoop(elastic.ElasticLoop):
    """Iterate over this rank's mini-batches; every step is committed on all ranks or on none.

        job = ElasticLoop(model, optimizer, dataset, batch_size=64, epochs=10)
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                job.log(loss=loss)
                optimizer.step()

    The loop yields this rank's share of the next ``batch_size`` samples (of all ranks together).
    The first ``optimizer.step()`` of a block begins with a vote: it updates parameters only when
    all ranks have reached it. When a worker is lost before that, the block ends early, buffers and
    random state are restored, and the same samples are computed again in the next group. A block
    without an ``optimizer.step()`` is committed at its end. Gradients belong to one block; those of
    an interrupted block are dropped. A block must not communicate after ``optimizer.step()``.

    ``dataset`` is a map-style data set, a tuple of tensors or arrays with samples along the
    first axis, or a [ShardedDataset][potluck.data.ShardedDataset] for data that does not fit into
    memory. ``num_workers`` processes load and transform samples, each ``prefetch`` steps ahead;
    with 0 they are loaded when they are needed.

    A stream, such as a torch ``IterableDataset`` or a function that returns an iterator, has no
    length: pass ``epochs``, or ``max_steps``, after which the training ends (with other data sets,
    too). Every rank reads the same stream, in its order, and takes its share of each batch; each
    item counts once, if the stream can seek (``state_dict``, or a function ``items(position)``) or
    gives the same items again. ``collate`` is called for a rank's own items only, by the
    ``num_workers`` if there are any.

    With ``samples="all"`` every rank has the same ``dataset``, and computes its share of each step.
    With ``"own"`` it is this rank's own part, of any size, and stays there: ranks take equal
    fractions of their own in each step, and each sample counts once per epoch. The samples of a
    lost rank leave with it. A rank that has none gets tensors of 0 samples (of data sets that are
    no tensors None), and its gradient does not count.

    With ``frozen="own"`` each rank has read the parameters that require no gradient by itself, as
    the base model of LoRA. Then only what is trained, and buffers, is sent to newcomers and saved
    in checkpoints. Ranks compare hashes of the frozen parameters: Desync, or CheckpointError, names
    the first that differs.

    ``optimizer`` is an optimizer or a list of optimizers, without closures. ``also`` maps names to
    other objects with state_dict and load_state_dict (schedulers, a GradScaler) that are part of
    the state. Newcomers receive the state. ``checkpoint`` (a directory, or a
    CheckpointStore with options) saves it on disk, with each rank's random state; a training that
    has lost all ranks resumes from there, in a world of any size.

    ``policy`` sets intervals and limits, and whether shares follow the workers' speeds and the
    batch size the gradient noise. ``callbacks`` are objects with methods such as
    ``on_epoch_end(epoch, loss)``, or functions ``f(epoch, loss)``.

    ``strategy`` is how often ranks agree. ``DataParallel()``: in every step, as above. With
    ``LocalSGD(every=8)`` or ``DiLoCo(every=100)`` each rank takes that many steps alone, and the
    round of these steps is committed; the block stays as it is, but does not communicate. With
    ``Gossip("exponential")`` each rank then averages with its neighbours in a graph only.
    ``"auto"`` is the choice of ``potluck plan``, from the file that it wrote beside the script.

    The context is ``ctx``; if None, that of a DistributedDataParallel ``model``, else
    ``potluck.init()``.

    TypeError or ValueError for an optimizer of another model, a stream without ``epochs`` and
    ``max_steps``, a batch size below 1. Iterating raises [DataError][potluck.errors.DataError] for
    a stream that fails, [Diverged][potluck.errors.Diverged] if replicas differ,
    [RemoteError][potluck.errors.RemoteError] if another rank's script failed, and the GroupError
    that ended the group if no next group can be formed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        dataset: Any,
        *,
        batch_size: int,
        epochs: int | None = None,
        max_steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        checkpoint: str | os.PathLike[str] | CheckpointStore | None = None,
        also: Mapping[str, Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        prefetch: int = 2,
        policy: Policy | None = None,
        callbacks: Sequence[object] = (),
        ctx: DistributedContext | None = None,
        strategy: Strategy | Literal["auto"] | None = None,
        samples: Literal["all", "own"] = "all",
        frozen: Literal["sent", "own"] = "sent",
    ) -> None:
        if frozen not in ("sent", "own"):
            raise ValueError(f'frozen is {frozen!r}; it must be "sent" or "own"')
        check_samples(samples)
        if strategy != "auto" and not isinstance(strategy, Strategy | None):
            raise TypeError(
                f"strategy is {strategy!r}: pass DataParallel(), LocalSGD(...), DiLoCo(...), "
                'Gossip(...), or "auto", the choice of `potluck plan`'
            )
        ddp = model if isinstance(model, DistributedDataParallel) else None
        if ctx is None:
            ctx = init() if ddp is None else ddp.ctx
        self._planning: list[Planning] = []
        if is_planning():
            self._planning = [Rehearsal(ctx, model, policy)]
            strategy, checkpoint, callbacks = None, None, ()  # nothing is trained or written
        elif strategy == "auto":
            planned = Planned(ctx, model)
            self._planning, strategy = [planned], planned.strategy
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in optimizers:
            if not isinstance(each, Optimizer):
                raise TypeError(f"optimizer is a {type(each).__name__}, not a torch Optimizer")
        _check_parameters(optimizers, [model, *(also or {}).values()])
        stream = stream_of(dataset)
        if stream is not None and epochs is None and max_steps is None:
            raise ValueError(
                "a stream may have no end: pass max_steps=, the number of steps after which the "
                "training ends, or epochs=1 if the stream ends by itself"
            )
        dataset = _with_length(dataset) if stream is None else stream
        if epochs is None:
            epochs = 1 if stream is None else STREAM
        if checkpoint is not None and not isinstance(checkpoint, CheckpointStore):
            checkpoint = CheckpointStore(checkpoint)
        self._model, self._ddp = model, ddp
        schedule = schedule_of(dataset, batch_size, epochs, seed, shuffle, samples)
        if max_steps is not None:
            max_steps = checked_whole("max_steps", max_steps, at_least=1)
            schedule = replace(schedule, max_steps=max_steps)
        self._loader = Loader(
            dataset, collate, num_workers=num_workers, prefetch=prefetch, seed=seed
        )
        self._outer: OuterStrategy | None = None
        if strategy is not None and strategy.in_rounds:
            if ddp is not None and ddp.compression is not None:
                raise ValueError(
                    "the gradients of this DistributedDataParallel are compressed, but with a "
                    "strategy of rounds none are sent: leave its compression= out"
                )
            inner = model if ddp is None else ddp.module
            self._outer = outer_of(strategy, inner, optimizers, also or {})
        elif strategy is not None and ddp is not None:
            ddp.follow(strategy)
        super().__init__(
            ctx,
            schedule,
            TorchReplica(model, optimizers, also or {}, self._outer, own_frozen=frozen == "own"),
            checkpoint=checkpoint,
            policy=policy,
            callbacks=callbacks,
            strategy=self._outer,
            stream=stream,
        )
        batching = policy is not None and policy.batching is not None
        self._probe = NoiseProbe(model) if batching else None
        scalers = [each for each in (also or {}).values() if isinstance(each, GradScaler)]
        self._scaler = scalers[0] if scalers else None
        for scaler in scalers:
            scaler.attach(optimizers, self._skip, self._end_part)
        in_steps = self._outer is None and not is_planning()
        if in_steps and ddp is not None and ddp.compression is None:
            self._planning.append(Suggestion(ctx))
        self._is_local = in_steps and ddp is None  # right for one worker only
        self._keeper: Reducer | None = None
        """Of a model without a DistributedDataParallel: sums the parts of a step."""
        # Where nothing bounds this process, there is nothing to look at in every step.
        self._memory = StepMemory(model) if own_room() is not None else None
        self._hooks = [
            each.register_step_pre_hook(self._before_optimizer_step) for each in optimizers
        ]

    def __iter__(self) -> Iterator[Any]:
        planning = self._planning
        try:
            for share in super().__iter__():
                for each in planning:
                    each.begin()
                if self._is_local and self.ctx.world_size > 1:
                    raise ValueError(
                        f"{self.ctx.world_size} workers train {type(self._model).__name__}, but "
                        "its gradients are not reduced: wrap it in "
                        "potluck.torch.DistributedDataParallel"
                    )
                try:
                    samples = self._loader.load(share, self._upcoming)
                except Exception as error:
                    self.ctx.abort(error)
                    raise
                if self._memory is not None:
                    self._memory.begin(len(share.indices))
                yield samples
                if not self.most_at_once and 0 < (most := self._most_that_fit()) < self.batch_size:
                    self._training.cap.most = most  # others learn it when a group forms
                if any(each.end(is_last=self.done) for each in planning):
                    break  # before replicas are compared, which a rehearsal has trained apart
            for each in planning:
                each.finish()
        finally:
            self._loader.close()
            if self._ddp is not None:
                self._ddp.reduces = True
                self._ddp.begin_part()
        if self._probe is not None:
            self._probe.close()  # another loop may train the same model
        for hook in self._hooks:
            hook.remove()
        if self._memory is not None:
            self._memory.close()

    def log(self, **facts: Any) -> None:
        """Report facts to ``potluck run`` and ``potluck status``: names and numbers or strings.

        In a step, before ``optimizer.step()``, ``loss`` is averaged over all ranks. Outside of a
        step facts describe the whole training: ``test_accuracy=0.98``.
        """
        super().log(**{k: v.detach() if isinstance(v, Tensor) else v for k, v in facts.items()})

    def commit(self, *, loss: float | None = None, ok: bool = True, skipped: bool = False) -> None:
        """Vote to commit the step, as the first ``optimizer.step()`` does; for blocks with another
        update, or with ``skipped`` (equal on all ranks) for blocks without an update."""
        super().commit(loss=loss, ok=ok, skipped=skipped)
        if skipped:
            self._keep_residuals()
        if self._probe is not None and self._share is not None and self._batch is not None:
            factor = 1.0 if self._scaler is None else self._scaler.factor
            seen = self._probe.take(self._share, self._batch, factor)
            if (
                seen is not None and not skipped and len(self._parts.parts) == 1
            ):  # else the gradients may be infinite
                self.add_noise(*seen)

    def parameter_hash(self) -> str:
        """Hex SHA-256 of the model's parameters, with ``frozen="own"`` of those that are trained;
        equal on all ranks."""
        return self._replica.parameter_hash()

    def evaluate(
        self,
        dataset: Any,
        measure: Callable[[Any], Mapping[str, tuple[Any, float]]],
        *,
        batch_size: int = 32,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> dict[str, float]:
        """Exact means over ``dataset``, of which every sample counts once, on whatever ranks.

            def measure(samples):
                x, y = samples
                scores = model(x)
                loss = F.cross_entropy(scores, y, reduction="sum")
                return {"loss": (loss, len(x)), "accuracy": ((scores.argmax(1) == y).sum(), len(x))}

        A collective call with the same map-style ``dataset`` on all ranks; each computes a part by
        its speed. ``measure`` gets up to ``batch_size`` samples, without gradients and with the
        model in its evaluation mode, and returns by name a total and what it counts, such as
        samples or tokens. Call it in a step before ``optimizer.step()``, where it is repeated with
        the step if a rank is lost (of the parts of a step the first evaluates, the others get its
        result), or after the loop, where the ranks that are left compute it again; between two
        steps it raises PeerLost. ValueError for an empty data set, RuntimeError in the steps of a
        strategy of rounds. Cost: a broadcast of buffers, so that all ranks have rank 0's, and an
        all_reduce of 16 bytes, and 16 for each name.
        """
        samples = _with_length(dataset)
        num = len(samples)
        batch_size = checked_whole("batch_size", batch_size, at_least=1)
        batch_size = min(batch_size, self.most_at_once or batch_size)
        if not num:
            raise ValueError("the data set to evaluate has no samples")

        def measured(part: range) -> dict[str, tuple[float, float]]:
            if self._ddp is not None and self._ddp.broadcast_buffers:
                broadcast_tensors(self.ctx, dict(self._ddp.module.named_buffers()))
            totals: dict[str, tuple[float, float]] = {}
            for first in range(0, len(part), batch_size):
                found = measure(collate([samples[i] for i in part[first : first + batch_size]]))
                for name, (total, count) in found.items():
                    before = totals.get(name, (0.0, 0.0))
                    totals[name] = before[0] + float(total), before[1] + float(count)
            return totals

        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                return self._means(num, measured)
        finally:
            for module, is_training in modes:
                module.training = is_training

    @property
    def num_nonfinite(self) -> Counter[str]:
        """By parameter: how many elements were inf, NaN or beyond a codec's range. With ``Gossip``
        those of this rank at the end of a round; with ``LocalSGD`` and ``DiLoCo`` of what a round
        changed, on a rank or in the sum; else of compressed gradients (see ``DDP``)."""
        if self._outer is not None:
            return self._outer.num_nonfinite
        return Counter() if self._ddp is None else self._ddp.num_nonfinite

    def _skip(self) -> None:
        """Commit the step without an update, for a scaler."""
        super().commit(skipped=True)
        self._keep_residuals()

    def _end_part(self) -> None:
        if self._open and not self._parts.is_last:
            super().commit()

    def _divided(self, share: Share) -> Parts:
        return Parts(share, self.most_at_once)

    def _weigh(self, part: Share) -> None:
        super()._weigh(part)
        parts = self._parts
        if self._ddp is None and self._keeper is None and not parts.is_last:
            trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
            self._keeper = Reducer(trained, self.ctx, 25)
        if self._keeper is not None:
            self._keeper.weight = part.weight
        reducer = self._ddp or self._keeper
        if reducer is not None:
            reducer.begin_part(is_first=parts.is_first, is_last=parts.is_last)

    def _most_that_fit(self) -> int:
        return 0 if self._memory is None else self._memory.most()

    def _release(self, error: BaseException) -> None:
        """Detach, in place, what variables of the script hold of the step's graph, which they do
        until the next step has replaced them."""
        super()._release(error)
        for frame, _ in walk_tb(error.__traceback__):
            names = frame.f_locals
            held = list(names.values())
            for each in [*held, *(x for group in held for x in _items(group))]:
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    with contextlib.suppress(RuntimeError):  # a view can't be detached
                        each.detach_()
            if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                names.clear()  # a copy, which the frame would keep
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _keep_residuals(self) -> None:
        """After a step without an update: what it has sent was applied by no rank."""
        if self._ddp is not None and self._ddp.compression is not None:
            self._ddp.compression.undo()

    def _on_step_time(self, step_s: float, waited_s: float) -> None:
        for each in self._planning:
            each.timed(step_s, waited_s)

    def _before_optimizer_step(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._open:
            return
        self._end_part()
        # args begins with the optimizer itself.
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError("an optimizer that takes a closure can't step on all ranks or on none")
        if self._scaler is not None and self._scaler.pending:
            raise RuntimeError("gradients are still scaled: call scaler.step(optimizer) instead")
        self.commit()


def _items(group: Any) -> list[Any]:
    """What a tuple, a list or a dict of the script holds."""
    if isinstance(group, Mapping):
        return list(group.values())
    return list(group) if isinstance(group, tuple | list) else []


def _check_parameters(optimizers: Sequence[Optimizer], trained: Sequence[Any]) -> None:
    """ValueError for an optimizer without parameters of the model, for example of a copy of it."""
    modules = [each for each in trained if isinstance(each, nn.Module)]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if own.isdisjoint(known):
            raise ValueError(
                f"the {type(optimizer).__name__} holds no parameter of the model, so it would "
                "train nothing: make it from model.parameters(), with the model on its device"
            )


def _with_length(dataset: Any) -> Any:
    """``dataset``, or a TensorDataset of a tuple of tensors."""
    if isinstance(dataset, tuple):
        tensors = [torch.as_tensor(each) for each in dataset]
        sizes = [len(each) if each.dim() else 0 for each in tensors]
        if len(set(sizes)) != 1:
            raise ValueError(f"the data set's tensors have {sizes} samples; they must be equal")
        return TensorDataset(*tensors)
    if isinstance(dataset, ShardedDataset):
        return dataset
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "the loop makes the batches itself, since the parts of ranks change: pass the "
            "DataLoader's data set, and num_workers= if loading takes long"
        )
    # A dict by name, as datasets.IterableDatasetDict is, has both methods but no sample 0.
    is_named = isinstance(dataset, Mapping) and 0 not in dataset
    if is_named or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} is no map-style data set: the loop needs __len__ and "
            "__getitem__, or __iter__ of a stream"
            + ("; of a dict of data sets, pass one" if is_named else "")
        )
    return dataset


class NoiseProbe:
    """Records the squared norms of local and reduced gradients at each backward through ``model``.

    Cost: two norms per parameter and backward, no communication.
    """

    def __init__(self, model: nn.Module) -> None:
        self._interceptor = GradientInterceptor(model, keep=_squared)

    def close(self) -> None:
        """Stop measuring."""
        self._interceptor.close()

    def take(self, share: Share, batch: Batch, factor: float) -> tuple[float, float] | None:
        """Unbiased |G|^2 and tr(Sigma) from the last backward, as ``training/noise.py`` defines
        them.

        ``factor`` is the loss scale of that backward. None if there is no estimate: this rank had
        no samples or all samples, or gradients were not reduced.
        """
        capture, self._interceptor.last = self._interceptor.last, None
        if capture is None:
            return None
        local, reduced = _sum(capture, "local"), _sum(capture, "reduced")
        if local is None or reduced is None:
            return None
        scale = factor * factor
        num = round(share.num_samples / share.weight) if share.weight else batch.size
        return unbiased(local / scale, share.num_samples, reduced / scale, num)


def _squared(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def _sum(capture: Capture, which: str) -> float | None:
    kept = [getattr(gradient, which) for gradient in capture.gradients.values()]
    if not kept or any(value is None for value in kept):
        return None
    return float(torch.stack([value.cpu() for value in kept]).sum())
