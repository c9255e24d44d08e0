"""Bad input around the training loop: refused where it is passed, with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.torch import (
    DDP,
    CheckpointStore,
    ElasticLoop,
    GradientInterceptor,
    GradScaler,
    LossScale,
    Policy,
    ProgressBar,
    TensorBoardLogger,
)

X, Y = torch.zeros(8, 2), torch.zeros(8)


def loop(ctx: DistributedContext, **changed: Any) -> ElasticLoop:
    model = DDP(nn.Linear(2, 1), ctx)
    options: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": (X, Y),
        "batch_size": 4,
    }
    options |= changed
    return ElasticLoop(model, options.pop("optimizer"), options.pop("dataset"), **options)


MISTAKES: list[tuple[Callable[[DistributedContext], Any], type[Exception], str]] = [
    (lambda c: loop(c, batch_size=0), ValueError, "batch_size is 0"),
    (lambda c: loop(c, batch_size=4.0), TypeError, "batch_size is 4.0; it must be a whole number"),
    (lambda c: loop(c, epochs=-1), ValueError, "epochs -1"),
    (lambda c: loop(c, dataset=(X, Y[:3])), ValueError, r"\[8, 3\] samples; they must be equal"),
    (lambda c: loop(c, dataset=(X[:0],)), ValueError, "the data set is empty"),
    (lambda c: loop(c, dataset=iter([1])), ValueError, "a stream may have no end: pass max_steps="),
    (lambda c: loop(c, dataset=3), TypeError, "int is no map-style data set"),
    (lambda c: loop(c, dataset=DataLoader([1])), TypeError, "pass the DataLoader's data set"),
    (lambda c: loop(c, optimizer=[0.1]), TypeError, "optimizer is a float, not a torch Optimizer"),
    (
        lambda c: loop(c, optimizer=torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)),
        ValueError,
        "the SGD holds no parameter of the model",
    ),
    (lambda c: DDP(nn.Linear(2, 1, device="meta"), c), ValueError, "weight is on the meta device"),
    (lambda c: loop(c, also={"s": 3}), TypeError, r"also\['s'\] is a int: it needs state_dict"),
    (lambda c: loop(c, callbacks=ProgressBar()), TypeError, "callbacks is a ProgressBar; pass a"),
    (lambda c: loop(c, callbacks=[ProgressBar]), TypeError, r"pass ProgressBar\(\)"),
    (lambda c: loop(c, callbacks=[print, lambda loss: 0]), TypeError, r"be called as f\(epoch, l"),
    (lambda c: loop(c, callbacks=[object()]), TypeError, "object has none of them; a callback has"),
    (lambda c: Policy(save_every=0), ValueError, "save_every is 0; it must be at least 1"),
    (lambda c: Policy(shares=True), TypeError, r"shares is True: pass a ProportionalShares\("),
    (lambda c: Policy(batching=8), TypeError, r"batching is 8: pass a NoiseBatching\("),
    (lambda c: GradScaler(65536.0), TypeError, r"pass potluck.torch.LossScale\(scale="),
    (lambda c: LossScale(scale=0.0), ValueError, "scale 0.0 .* must be positive"),
    (lambda c: CheckpointStore("x", keep=0), ValueError, "keep is 0"),
    (lambda c: DDP(nn.Linear(2, 1), c, bucket_size_mb=0), ValueError, "it must be positive"),
    (
        lambda c: DDP(nn.Linear(2, 1), c, bucket_size_mb=float("nan")),
        ValueError,
        "bucket_size_mb is nan",
    ),
    (lambda c: GradientInterceptor(nn.ReLU()), ValueError, "no parameter of ReLU requires"),
    (lambda c: TensorBoardLogger("x", every=0), ValueError, "every is 0"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda n: MISTAKES[n][2][:30])
def test_it_is_refused_and_the_remedy_named(number: int) -> None:
    mistake, error, text = MISTAKES[number]
    with DistributedContext(LocalBackend()) as ctx, pytest.raises(error, match=text):
        mistake(ctx)


def test_tensorboard_figures_belong_into_a_training() -> None:
    pytest.importorskip("tensorboardX", reason="pip install 'potluck[tensorboard]'")
    with pytest.raises(RuntimeError, match=r"pass this object in callbacks="):
        TensorBoardLogger("x").log(1, accuracy=0.5)
