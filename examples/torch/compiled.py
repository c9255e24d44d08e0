"""torch.compile over potluck: a DDP model, and code that calls functional collectives.

potluck run --workers 2 examples/torch/compiled.py
torchrun --nproc-per-node 2 examples/torch/compiled.py
python examples/torch/compiled.py

In float64, against one process that compiles nothing. The default backend needs no C++ compiler;
with one, say ``--compiler inductor``.
"""

import argparse
import copy
import sys

try:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from sklearn.datasets import load_digits
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compiler", default="aot_eager", help="aot_eager, inductor, eager")
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

digits = load_digits()
x = torch.tensor(digits.images / 16).flatten(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train_x, train_y = x[~test], y[~test]


class Net(nn.Module):
    """With a forward of its own: of a bare nn.Sequential under DDP torch compiles nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, images):
        return self.last(torch.relu(self.first(images)))


@torch.compile(backend=args.compiler, fullgraph=True)
def accuracy(scores, labels):
    """Over all ranks' parts of the test set; the collective is part of the graph."""
    counts = torch.stack([(scores.argmax(1) == labels).sum(), torch.tensor(len(labels))])
    right, total = functional.all_reduce(counts, "sum", dist.group.WORLD)
    return right / total


def train(model, part, parts):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    chooser = torch.Generator().manual_seed(1)  # the same batches everywhere
    for _ in range(args.steps):
        mine = torch.randint(len(train_y), (64,), generator=chooser).chunk(parts)[part]
        optimizer.zero_grad()
        cross_entropy(model(train_x[mine]), train_y[mine]).backward()
        optimizer.step()


alone = Net()
model = DistributedDataParallel(copy.deepcopy(alone))
compiled = torch.compile(model, backend=args.compiler)
train(compiled, rank, world_size)
with torch.no_grad():
    parts = x[test].chunk(world_size), y[test].chunk(world_size)
    reached = accuracy(model(parts[0][rank]), parts[1][rank])
if rank == 0:
    graphs = counters["stats"]["unique_graphs"]
    train(alone, 0, 1)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    away = max((a - b).abs().max().item() for a, b in pairs)
    print(
        f"test accuracy {reached.item():.4f}, {graphs} graphs compiled, {world_size} workers",
        end="; ",
    )
    print(f"parameters differ from one process by {away:.1e}")
dist.destroy_process_group()
