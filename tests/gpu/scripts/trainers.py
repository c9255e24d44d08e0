"""Trainers of every strategy and precision on the devices given, one for each rank.

trainers.py FOLDER DEVICE... saves what each has learned as FOLDER/<strategy>-<case>-<rank>.npz.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import potluck
from potluck import DistributedNeuralNetTrainer, TrainingStrategy
from potluck.data import NumpyFiles
from potluck.torch import LossScale

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(192, 20, generator=GENERATOR, dtype=torch.float64)
Y = (X[:, :5] + 0.3 * torch.randn(192, 5, generator=GENERATOR)).argmax(dim=1)
SIZES: dict[str, Any] = {"input_dim": 20, "hidden_dims": [32, 16], "output_dim": 5}
NUM_MINE = 120  # of rank 0; rank 1 has the others


def own_model() -> nn.Module:
    """In float64, so that two devices agree in many digits."""
    torch.manual_seed(5)
    layers = (nn.Linear(20, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 5))
    return nn.Sequential(*layers).double()


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def cases(strategy: TrainingStrategy) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "dense", SIZES
    yield "files", SIZES
    yield "bfloat16", {**SIZES, "mixed_precision": torch.bfloat16}
    if strategy is not TrainingStrategy.MODEL_PARALLEL:
        yield "own", {"model": own_model(), "loss": own_loss}
        if strategy is not TrainingStrategy.PARAMETER_SERVER:
            scaling = LossScale(scale=2.0**40)  # too large at first: float16 has no such numbers
            yield "float16", {**SIZES, "mixed_precision": torch.float16, "loss_scaling": scaling}


def main(folder: Path, devices: list[str]) -> None:
    with potluck.init() as ctx:
        device = torch.device(devices[ctx.rank])
        mine = slice(NUM_MINE) if ctx.rank == 0 else slice(NUM_MINE, None)
        files = {name: folder / f"{name}-{ctx.rank}.npy" for name in ("x", "y")}
        np.save(files["x"], X[mine].float().numpy())
        np.save(files["y"], Y[mine].numpy())
        for strategy in TrainingStrategy:
            for name, options in cases(strategy):
                samples = (NumpyFiles(files, rows_per_shard=25),) if name == "files" else (X, Y)
                if name != "files":
                    samples = tuple(each[mine] for each in samples)
                with DistributedNeuralNetTrainer(
                    ctx, strategy, device=device, batch_size=24, seed=1, **options
                ) as trainer:
                    first = trainer.train_epoch(*samples)
                    loss = trainer.train(*samples, epochs=7)
                    assert loss == trainer.get_global_loss() < first, (strategy, name, first, loss)
                    parameters = list(trainer.model.parameters())
                    assert all(each.device.type == device.type for each in parameters)
                    found = trainer.get_parameters()
                    trainer.set_parameters(found)
                    path = folder / f"{strategy.name}-{name}-{ctx.rank}.npz"
                    np.savez(path, loss=loss, outputs=trainer.predict(X), **found)
        print("all are trained", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
