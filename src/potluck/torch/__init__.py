"""potluck for PyTorch: data parallelism and the elastic training loop."""

import importlib
from typing import Any

from potluck._core.optional import require

require("torch", "torch")

from potluck._core import hints  # noqa: E402
from potluck._core.autoload import register as _register  # noqa: E402
from potluck.checkpoint import CheckpointStore  # noqa: E402
from potluck.torch.amp import GradScaler, LossScale  # noqa: E402
from potluck.torch.clip import clip_grad_norm_  # noqa: E402
from potluck.torch.ddp import DDP, DistributedDataParallel  # noqa: E402
from potluck.torch.hooks import CompressionState, compression_hook  # noqa: E402
from potluck.torch.intercept import GradientInterceptor  # noqa: E402
from potluck.torch.loop import ElasticLoop  # noqa: E402
from potluck.torch.parameter_server import ServerOptimizer  # noqa: E402
from potluck.torch.sampler import DistributedSampler  # noqa: E402
from potluck.training import NoiseBatching, Policy, ProportionalShares  # noqa: E402
from potluck.training.progress_bar import ProgressBar  # noqa: E402
from potluck.training.strategies import (  # noqa: E402
    DataParallel,
    DiLoCo,
    Gossip,
    LocalSGD,
    OuterSGD,
)
from potluck.training.tensorboard import TensorBoardLogger  # noqa: E402

__all__ = [
    "DDP",
    "CheckpointStore",
    "CompressionState",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "ElasticLoop",
    "Gossip",
    "GradScaler",
    "GradientInterceptor",
    "LocalSGD",
    "LossScale",
    "NoiseBatching",
    "OuterSGD",
    "Policy",
    "ProgressBar",
    "ProportionalShares",
    "ServerOptimizer",
    "TensorBoardLogger",
    "clip_grad_norm_",
    "compression_hook",
]

_register()


def __getattr__(name: str) -> Any:
    """Import ``ProcessGroupPotluck`` when it is used: it derives from a class of torchft."""
    if name == "ProcessGroupPotluck":
        return importlib.import_module("potluck.torch.plugins.torchft").ProcessGroupPotluck
    raise hints.of_module(__name__, name)
