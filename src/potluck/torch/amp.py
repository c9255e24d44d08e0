"""Mixed precision: a loss scaler whose decisions are equal on all ranks, for the elastic loop.

Parameters stay in float32 (the master weights) and ``torch.autocast`` computes in half precision::

    scaler = potluck.torch.GradScaler()
    job = ElasticLoop(model, optimizer, data, batch_size=64, also={"scaler": scaler})
    for x, y in job:
        with job.step():
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            job.log(loss=loss)
            scaler.step(optimizer)
            scaler.update()

bfloat16 has float32's range and needs no scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from potluck._core import hints
from potluck.torch.clip import groups_of, is_sharded


class GradScaler:
    """Dynamic loss scaling for float16, as torch.amp's GradScaler, with equal decisions on all
    ranks.

    An overflow is detected in the reduced gradients, which are bit-identical on all ranks: an inf
    of one rank is in the gradients of all. So all ranks skip the step or none does, without
    communication. (Sharded gradients, DTensors, cost one all_reduce of one number.) All optimizers
    of an ElasticLoop step together or not at all.

    Pass the scaler to the loop as ``also={"scaler": scaler}``: then newcomers and checkpoints get
    its state, and a skipped step is committed without an update (``job.num_skipped`` counts them).

    ``rule`` is the initial scale and how it changes. With ``enabled=False`` losses are not scaled,
    and ``step`` only calls the optimizer. TypeError for another ``rule``.
    """

    def __init__(self, rule: LossScale | None = None, *, enabled: bool = True) -> None:
        if rule is not None and not isinstance(rule, LossScale):
            raise TypeError(f"rule is {rule!r}: pass potluck.torch.LossScale(scale=...)")
        self.enabled = enabled
        self._rule = rule or LossScale()
        self._optimizers: Sequence[Optimizer] = ()
        self._commit: Callable[[], None] | None = None
        self._end_part: Callable[[], None] | None = None
        # The present step.
        self._scaled = False
        self._unscaled: list[Optimizer] = []
        self._flags: dict[torch.device, Tensor] = {}
        self._overflow: bool | None = None

    @property
    def factor(self) -> float:
        """The present loss scale; 1 if not enabled."""
        return self._rule.scale if self.enabled else 1.0

    @property
    def pending(self) -> bool:
        """Whether a loss was scaled whose gradients are not unscaled yet."""
        return self._scaled and not self._unscaled

    def attach(
        self,
        optimizers: Sequence[Optimizer],
        commit: Callable[[], None],
        end_part: Callable[[], None],
    ) -> None:
        """Attach the scaler to a loop, which calls this. ``commit()`` commits a step without an
        update; ``end_part()`` leaves a part of a step that is not its last."""
        self._optimizers, self._commit, self._end_part = tuple(optimizers), commit, end_part

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale; call ``backward()`` on the result."""
        if not self.enabled:
            return loss
        if self._unscaled:
            self._begin()  # the last step was interrupted before its update
        self._scaled = True
        return loss * self._rule.scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, for example to clip them before ``step``."""
        if not self.enabled or optimizer in self._unscaled:
            return
        if not self._scaled:
            raise RuntimeError("nothing is scaled: call scaler.scale(loss).backward() first")
        if self._end_part is not None:
            self._end_part()
        self._unscaled.append(optimizer)
        inverse = 1.0 / self._rule.scale
        for gradient in _gradients(optimizer):
            local = gradient.to_local() if is_sharded(gradient) else gradient
            local.mul_(inverse)
            flag = self._flags.setdefault(local.device, torch.zeros((), device=local.device))
            flag.logical_or_(local.isfinite().all().logical_not())

    def step(self, optimizer: Optimizer) -> Any:
        """Call ``optimizer.step()``; after an overflow commit the step without an update
        instead."""
        if not self.enabled:
            return optimizer.step()
        for each in self._optimizers or (optimizer,):
            self.unscale_(each)
        self._overflow = self._decide()
        if not self._overflow:
            return optimizer.step()
        if self._commit is not None:
            self._commit()
        return None

    def update(self) -> None:
        """Set the loss scale of the next step. Call it once per step, after ``step``."""
        if not self.enabled:
            return
        if self._overflow is None:
            raise RuntimeError("scaler.update() comes after scaler.step(optimizer)")
        overflow = self._overflow
        self._begin()
        self._rule = self._rule.after(overflow)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and the number of steps since its last change."""
        return {"scale": self._rule.scale, "num_good": self._rule.num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the loss scale from a ``state_dict``."""
        self._begin()
        self._rule = replace(
            self._rule, scale=float(state["scale"]), num_good=int(state["num_good"])
        )

    def _begin(self) -> None:
        self._scaled, self._overflow = False, None
        self._unscaled, self._flags = [], {}

    def _decide(self) -> bool:
        sharded = [g for each in self._unscaled for g in _gradients(each) if is_sharded(g)]
        for group in groups_of(sharded):
            for flag in self._flags.values():
                torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        return any(bool(flag) for flag in self._flags.values())


def _gradients(optimizer: Optimizer) -> Iterable[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16:
                raise ValueError(
                    "a float16 parameter can't be trained with loss scaling: keep parameters in "
                    "float32 and compute under torch.autocast(..., torch.float16)"
                )
            yield parameter.grad


@hints.of_init({}, "potluck.torch.LossScale(scale=1024.0)", same=hints.SCALE)
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A loss scale, with the rule by which it changes.

    ``scale`` is multiplied by ``growth`` after ``interval`` consecutive steps without an overflow
    (``num_good`` so far), and by ``backoff`` after each overflow.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 2.0**-14
    num_good: int = 0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and self.growth > 1 and 0 < self.backoff < 1 and self.interval > 0):
            raise ValueError(
                f"scale {self.scale} and interval {self.interval} must be positive, growth "
                f"{self.growth} above 1, backoff {self.backoff} between 0 and 1"
            )

    def after(self, overflow: bool) -> LossScale:
        """The loss scale of the next step.

        FloatingPointError if the scale would fall below ``minimum``: then the loss itself
        overflows.
        """
        if overflow:
            smaller = self.scale * self.backoff
            if smaller < self.minimum:
                raise FloatingPointError(
                    f"gradients are not finite even at a loss scale of {self.scale:g}: the loss "
                    "is infinite or NaN, or the training diverges; lower the learning rate"
                )
            return replace(self, scale=smaller, num_good=0)
        if self.num_good + 1 == self.interval:
            return replace(self, scale=self.scale * self.growth, num_good=0)
        return replace(self, num_good=self.num_good + 1)
