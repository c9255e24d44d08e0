"""Communication hooks on torch's DDP over potluck: gradients in fewer bytes, with error feedback.

potluck run --workers 2 examples/torch/comm_hooks.py
torchrun --nproc-per-node 2 examples/torch/comm_hooks.py --hook int8
python examples/torch/comm_hooks.py

``int8``, ``int4``, ``bf16`` and ``fp16`` send fewer bits, encoded within the reduction; ``topk`` is
the largest tenth of the values. What is lost is kept and added to the next step's gradient
(error feedback).
``powersgd`` is torch's own hook. One process then trains the same batches without any of it.
"""

import argparse
import copy
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

from potluck import BF16, FP16, Quantize, TopK
from potluck.torch import CompressionState, compression_hook

STRATEGIES = {
    "int8": Quantize(bits=8),
    "int4": Quantize(bits=4),
    "bf16": BF16(),
    "fp16": FP16(),
    "topk": TopK(0.1),
}

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--hook", choices=[*STRATEGIES, "powersgd"], default="int8")
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train_x, train_y = x[~test], y[~test]

alone = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model = DistributedDataParallel(copy.deepcopy(alone))
if args.hook == "powersgd":
    model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=10), powerSGD_hook)
else:
    model.register_comm_hook(CompressionState(STRATEGIES[args.hook]), compression_hook)


def train(model: nn.Module, part: int, parts: int) -> float:
    """``args.steps`` steps on this part of each batch; the test accuracy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    chooser = torch.Generator().manual_seed(1)  # the same batches everywhere
    for _ in range(args.steps):
        mine = torch.randint(len(train_y), (64,), generator=chooser).chunk(parts)[part]
        optimizer.zero_grad()
        cross_entropy(model(train_x[mine]), train_y[mine]).backward()
        optimizer.step()
    return (model(x[test]).argmax(1) == y[test]).double().mean().item()


with_hook = train(model, rank, world_size)
if rank == 0:
    without = train(alone, 0, 1)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    away = max((a - b).abs().max().item() for a, b in pairs)
    largest = max(p.abs().max().item() for p in alone.parameters())
    print(f"test accuracy {with_hook:.4f} with {args.hook} on {world_size} workers", end=", ")
    print(f"{without:.4f} alone without; parameters differ by {away / largest:.1e} of the largest")
dist.destroy_process_group()
