"""Train a small convolutional network on handwritten digits, alone or on many workers.

python examples/digits.py                      alone: the serial baseline
potluck run --workers 4 examples/digits.py     four workers, the same result

Each worker computes on its part of every mini-batch; workers may die and come back on the way.
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
    package = error.name.partition(".")[0].replace("sklearn", "scikit-learn")
    sys.exit(f"digits.py needs the Python package {package}: pip install {package}")

import potluck.torch

EPOCHS, ACCURACY = 30, 0.97


def bundled():
    """scikit-learn's 1797 digits of 8x8 pixels, every fifth of them for the test."""
    digits = load_digits()
    x = torch.tensor(digits.images / 16).unsqueeze(1)
    y = torch.tensor(digits.target)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def read_idx(path):
    """The tensor in a file of MNIST's own format, packed (.gz) or not."""
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not packed.exists():
        sys.exit(
            f"{path} (or {packed.name}) is missing: put MNIST's four files into {path.parent}, or "
            "leave --data away to train on the digits that come with scikit-learn"
        )
    try:
        data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
        kind, num_axes = struct.unpack_from(">3sB", data)
        shape = struct.unpack_from(f">{num_axes}I", data, 4)
        values = np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes).reshape(shape)
        if kind != b"\0\0\x08":
            raise ValueError("it does not hold bytes")
    except (OSError, EOFError, struct.error, ValueError) as error:
        sys.exit(f"{path} is no whole IDX file: {error}")
    return torch.tensor(values)


def mnist(folder):
    files = []
    for part in ("train", "t10k"):
        files.append(read_idx(folder / f"{part}-images-idx3-ubyte").unsqueeze(1) / 255)
        files.append(read_idx(folder / f"{part}-labels-idx1-ubyte").long())
    return files


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="digits", help="digits (bundled) or mnist:DIR")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, all workers")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sample order")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--checkpoint", metavar="DIR", help="keep the state there, go on from it")
    help = f"or exit with 1; {ACCURACY} after the {EPOCHS} epochs of the default, else none"
    parser.add_argument("--require-accuracy", type=float, help=help)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    if args.data != "digits" and not args.data.startswith("mnist:"):
        sys.exit(f"--data is digits, or mnist:DIR with MNIST's four files in DIR, not {args.data}")
    x, y, test_x, test_y = bundled() if args.data == "digits" else mnist(Path(args.data[6:]))
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * (x.shape[-1] // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).to(dtype)
    model = potluck.torch.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    run = {"batch_size": args.batch_size, "epochs": args.epochs, "seed": args.seed}
    train = (x.to(dtype), y)
    job = potluck.torch.ElasticLoop(model, optimizer, train, checkpoint=args.checkpoint, **run)

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
    print(f"test accuracy {accuracy:.4f} after {job.step_number} steps")
    required = args.require_accuracy
    if required is None:
        required = ACCURACY if args.epochs == EPOCHS else 0
    if accuracy < required:
        sys.exit(f"the test accuracy is below {required}")
    return job


if __name__ == "__main__":
    main()
