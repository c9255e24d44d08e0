"""Train on Parquet files that are read shard by shard, so that they need not fit into memory.

python examples/parquet_digits.py                      alone
potluck run --workers 4 examples/parquet_digits.py     four workers, each reads a part

The files are the digits that come with scikit-learn. Every machine needs all files, at any path:
here each worker writes them into a folder of its own.
"""

import sys
import tempfile
from pathlib import Path

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F
except ModuleNotFoundError:
    sys.exit("parquet_digits.py needs: pip install 'potluck[torch,sklearn,data]'")

import potluck.torch as pt
from potluck.data import ParquetFiles

NUM_TRAIN = 1400


def write(folder):
    """Seven files, each with four row groups of 50 digits: a row group is a shard."""
    X, y = load_digits(return_X_y=True)
    for number, first in enumerate(range(0, NUM_TRAIN, 200)):
        part = slice(first, first + 200)
        table = pa.table({"pixels": list(X[part].astype("float32")), "digit": y[part]})
        pq.write_table(table, folder / f"digits-{number}.parquet", row_group_size=50)


def scaled(sample):
    """Runs for each sample as it is read: here a larger example would decode an image."""
    return {"pixels": torch.tensor(sample["pixels"]) / 16, "digit": sample["digit"]}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = pt.DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        data = ParquetFiles(f"{folder}/digits-*.parquet", transform=scaled)
        job = pt.ElasticLoop(model, optimizer, data, batch_size=50, epochs=15)
        for batch in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch["pixels"]), batch["digit"])
                loss.backward()
                job.log(loss=loss)
                optimizer.step()

    X, y = load_digits(return_X_y=True)
    with torch.no_grad():
        found = model(torch.tensor(X[NUM_TRAIN:] / 16, dtype=torch.float32)).argmax(1)
    accuracy = (found == torch.tensor(y[NUM_TRAIN:])).double().mean().item()
    job.log(test_accuracy=accuracy)
    print(f"test accuracy {accuracy:.3f} after {job.committed} samples")
    if accuracy < 0.88:
        sys.exit("the test accuracy is below 0.88")


if __name__ == "__main__":
    main()
