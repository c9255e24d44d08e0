"""potluck for PyTorch: data parallelism and the elastic training loop."""

from potluck.optional import require

require("torch", "torch")

from potluck.autoload import register as _register  # noqa: E402
from potluck.torch.ddp import DDP, DistributedDataParallel  # noqa: E402
from potluck.torch.loop import ElasticLoop  # noqa: E402
from potluck.torch.sampler import DistributedSampler  # noqa: E402
from potluck.training import Policy  # noqa: E402

__all__ = ["DDP", "DistributedDataParallel", "DistributedSampler", "ElasticLoop", "Policy"]

_register()
