"""Train on a data set that travels with the job: only the machine that starts it has the files.

python examples/shared_data.py write digits                      shards of the digits, in a folder
potluck run --data digits -n 2 examples/shared_data.py           each machine gets what it lacks

Training begins at the first shards; the others come while it runs, those first that are needed
first. A second run sends nothing.
"""

import sys
from pathlib import Path

import numpy as np

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F
except ModuleNotFoundError:
    sys.exit("shared_data.py needs: pip install 'potluck[torch,sklearn]'")

import potluck
import potluck.torch as pt
from potluck.data import NumpyFiles, shared

NUM_TRAIN = 1400
PER_SHARD = 100


def digits():
    X, y = load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y


def write(folder):
    folder.mkdir(exist_ok=True)
    X, y = digits()
    for number, first in enumerate(range(0, NUM_TRAIN, PER_SHARD)):
        np.save(folder / f"x-{number:02}.npy", X[first : first + PER_SHARD])
        np.save(folder / f"y-{number:02}.npy", y[first : first + PER_SHARD])


def train():
    folder = shared("digits")
    columns = {"x": folder.shards("x-*.npy"), "y": folder.shards("y-*.npy")}
    data = NumpyFiles(columns)  # counts the samples of shards that are still on their way
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with potluck.init() as ctx:
        model = pt.DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), ctx)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        job = pt.ElasticLoop(model, optimizer, data, batch_size=50, epochs=5)
        for batch in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch["x"]), batch["y"])
                loss.backward()
                job.log(loss=loss)
                optimizer.step()
        X, y = digits()
        with torch.no_grad():
            found = model(torch.from_numpy(X[NUM_TRAIN:])).argmax(1)
        accuracy = (found == torch.from_numpy(y[NUM_TRAIN:])).double().mean().item()
        print(f"test accuracy {accuracy:.3f} after {job.committed} samples")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]))
    else:
        train()
