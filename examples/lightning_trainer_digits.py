"""Lightning's Trainer over potluck: the strategy names the backend.

potluck run --workers 2 examples/lightning_trainer_digits.py
torchrun --nproc-per-node 2 examples/lightning_trainer_digits.py
python examples/lightning_trainer_digits.py
"""

import argparse
import hashlib
import os
import sys

try:
    import torch
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy
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


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.losses = []

    def training_step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    seed_everything(0, verbose=False)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1),
        torch.tensor(digits.target),
    )
    model = Classifier()
    # Named, because Lightning else tries other launchers, and begins MPI where mpi4py is installed.
    launched_by = LightningEnvironment()
    strategy = "auto"
    if DEVICES * NODES > 1:
        strategy = DDPStrategy(process_group_backend="potluck", cluster_environment=launched_by)
    trainer = Trainer(
        accelerator="cpu",
        devices=DEVICES,
        num_nodes=NODES,
        strategy=strategy,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))

    backend = torch.distributed.get_backend() if trainer.world_size > 1 else "none"
    state = model.state_dict()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values()))
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}, backend {backend}: "
        f"loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}, "
        f"parameters {digest.hexdigest()[:12]}"
    )


if __name__ == "__main__":
    main()
