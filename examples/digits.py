"""Train a small convolutional network on handwritten digits, alone or on many workers.

    python examples/digits.py                       alone: the serial baseline
    potluck run --workers 4 examples/digits.py      four workers, the same result

Every worker computes on its part of each mini-batch. Workers may die and come back on the way.
"""

import argparse
import gzip
import struct
import sys
from pathlib import Path

try:
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F
except ModuleNotFoundError as error:
    package = {"sklearn": "scikit-learn"}.get(error.name, error.name)
    sys.exit(f"digits.py needs the Python package {package}: pip install {package}")

import potluck.torch


def bundled():
    """scikit-learn's 1797 digits of 8x8 pixels; every fifth is kept for the test."""
    digits = load_digits()
    x = torch.tensor(digits.images / 16).unsqueeze(1)
    y = torch.tensor(digits.target)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def mnist(folder):
    """MNIST in its own IDX format: four files, as they are published (.gz) or unpacked."""

    def read(name):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                data = gzip.decompress(path.read_bytes()) if path.suffix else path.read_bytes()
                if data[:3] != b"\0\0\x08" or data[3] not in (1, 3):
                    sys.exit(f"{path} is no IDX file of bytes")
                shape = struct.unpack_from(f">{data[3]}I", data, 4)
                return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).copy()).view(shape)
        sys.exit(
            f"{folder / name} (or {name}.gz) is missing: download MNIST's four files into {folder}, "
            "or leave --data away to use the digits that come with scikit-learn"
        )

    files = [read(f"{s}-{k}-ubyte") for s in ("train", "t10k") for k in ("images-idx3", "labels-idx1")]
    x, y, test_x, test_y = files
    return x.unsqueeze(1) / 255, y.long(), test_x.unsqueeze(1) / 255, test_y.long()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="digits", help="digits (bundled), or mnist:DIR")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, all workers")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the sample order")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--checkpoint", help="folder to keep the state in, and to go on from")
    parser.add_argument("--require-accuracy", type=float, default=0.0, help="else exit code 1")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    x, y, test_x, test_y = mnist(Path(args.data[6:])) if args.data.startswith("mnist:") else bundled()
    side = x.shape[-1] // 4
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(dtype)
    model = potluck.torch.DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    job = potluck.torch.ElasticLoop(
        model, optimizer, (x.to(dtype), y), batch_size=args.batch_size, epochs=args.epochs,
        seed=args.seed, checkpoint=args.checkpoint,
    )

    for images, labels in job:
        with job.step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            job.log(loss=loss)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x.to(dtype)).argmax(1) == test_y).double().mean().item()
    job.log(test_accuracy=accuracy)
    print(f"test accuracy {accuracy:.4f} after {job.step_number} steps, loss {job.last_loss:.6f}, "
          f"parameters {job.parameter_hash()[:16]}")
    return 0 if accuracy >= args.require_accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
