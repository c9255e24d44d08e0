"""Hugging Face Accelerate over potluck: one handler names the backend, the rest is Accelerate's.

potluck run --workers 2 examples/accelerate_digits.py
torchrun --nproc-per-node 2 examples/accelerate_digits.py
python examples/accelerate_digits.py
"""

import argparse
import hashlib
import sys

try:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    sys.exit(
        f"this needs {error.name.partition('.')[0]}: pip install 'potluck[torch,sklearn,ecosystem]'"
    )

from potluck.torch.plugins.accelerate import process_group


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[process_group("potluck")])
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1),
        torch.tensor(digits.target),
    )
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())

    backend = torch.distributed.get_backend() if accelerator.num_processes > 1 else "none"
    state = accelerator.unwrap_model(model).state_dict()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values()))
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes}, backend {backend}: "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, parameters {digest.hexdigest()[:12]}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
