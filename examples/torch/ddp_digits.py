"""torch's own DistributedDataParallel over potluck, on handwritten digits.

potluck run --workers 2 examples/torch/ddp_digits.py
torchrun --nproc-per-node 2 examples/torch/ddp_digits.py
python examples/torch/ddp_digits.py
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--backend", default="potluck", help="or gloo: the one word to change")
args = parser.parse_args()

dist.init_process_group(args.backend, init_method="potluck://")
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train = TensorDataset(x[~test], y[~test])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=64 // dist.get_world_size(), sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

accuracy = (model(x[test]).argmax(1) == y[test]).double().mean()
if dist.get_rank() == 0:
    print(f"test accuracy {accuracy:.4f}, {dist.get_world_size()} workers, {dist.get_backend()}")
dist.destroy_process_group()
