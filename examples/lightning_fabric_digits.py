"""Lightning Fabric over potluck: the strategy names the backend.

potluck run --workers 2 examples/lightning_fabric_digits.py
torchrun --nproc-per-node 2 examples/lightning_fabric_digits.py
python examples/lightning_fabric_digits.py
"""

import argparse
import hashlib
import os
import sys

try:
    import torch
    from lightning.fabric import Fabric, seed_everything
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    sys.exit(
        f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,sklearn,ecosystem]'"
    )

# The launcher sets the number of workers of each machine.
DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
NODES = int(os.environ.get("WORLD_SIZE", 1)) // DEVICES


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    seed_everything(0, verbose=False)
    # Named, because Lightning else tries other launchers, and begins MPI where mpi4py is installed.
    launched_by = LightningEnvironment()
    strategy = "auto"
    if DEVICES * NODES > 1:
        strategy = DDPStrategy(process_group_backend="potluck", cluster_environment=launched_by)
    fabric = Fabric(accelerator="cpu", devices=DEVICES, num_nodes=NODES, strategy=strategy)
    fabric.launch()
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1),
        torch.tensor(digits.target),
    )
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))

    losses = []
    for epoch in range(args.epochs):
        if fabric.world_size > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())

    backend = torch.distributed.get_backend() if fabric.world_size > 1 else "none"
    state = model.state_dict()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values()))
    print(
        f"rank {fabric.global_rank} of {fabric.world_size}, backend {backend}: "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, parameters {digest.hexdigest()[:12]}"
    )


if __name__ == "__main__":
    main()
