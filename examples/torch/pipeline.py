"""Pipeline parallelism over potluck, cut by measured layer time, speed and memory of each node.

potluck run --workers 2 examples/torch/pipeline.py
torchrun --nproc-per-node 2 examples/torch/pipeline.py
python examples/torch/pipeline.py
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import cross_entropy
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

from potluck.torch.pipeline import split_sequential, survey

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--micro-batches", type=int, default=4)
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
is_first, is_last = rank == 0, rank == world_size - 1
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train_x, train_y = x[~test], y[~test]

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
    *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
)
layers, nodes = survey(model, train_x[: 64 // args.micro_batches])
stages = split_sequential(model, layers, nodes)
names = ", ".join(name for name, _ in stages[rank].named_children())
print(f"worker {rank}, speed {nodes[rank].speed:.2f}, has layers {names}")

stage = PipelineStage(stages[rank], rank, world_size, torch.device("cpu"))
schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=cross_entropy)
optimizer = torch.optim.Adam(stages[rank].parameters(), lr=1e-3)

losses = []
for _ in range(args.steps):
    batch = torch.randint(len(train_y), (64,))  # the same on all workers: one seed
    optimizer.zero_grad()
    losses.clear()
    samples = (train_x[batch],) if is_first else ()
    labels = {"target": train_y[batch], "losses": losses} if is_last else {}
    schedule.step(*samples, **labels)
    optimizer.step()

# Every stage's parameters back on all workers: stage s from worker s.
for owner, part in enumerate(stages):
    for parameter in part.parameters():
        dist.broadcast(parameter.detach(), owner)

if is_last:
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(1) == y[test]).double().mean()
    print(f"test accuracy {accuracy:.4f}, loss {torch.stack(losses).mean():.4f}")
dist.destroy_process_group()
