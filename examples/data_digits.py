"""Train on files that are read piece by piece, so that they need not fit into memory.

python examples/data_digits.py                                           Parquet, alone
potluck run --workers 4 examples/data_digits.py                          each reads a part
potluck run --workers 4 examples/data_digits.py --format webdataset      another format

The files are the digits that come with scikit-learn. Every machine needs all files, at any path:
here each worker writes them into a folder of its own.
"""

import argparse
import io
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F
except ModuleNotFoundError:
    sys.exit("data_digits.py needs: pip install 'potluck[torch,sklearn]'")

import potluck
import potluck.torch as pt
from potluck.data import ArrowFiles, NumpyFiles, ParquetFiles, WebDatasetFiles

NUM_TRAIN = 1400
ROWS = 50
"""The digits of a piece: of a row group, a record batch, an archive."""


def parquet(folder, pixels, digits):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"pixels": list(pixels), "digit": digits})
    pq.write_table(table, folder / "digits.parquet", row_group_size=ROWS)
    return ParquetFiles(folder / "digits.parquet")


def arrow(folder, pixels, digits):
    import pyarrow as pa

    table = pa.table({"pixels": list(pixels), "digit": digits})
    with pa.ipc.new_file(folder / "digits.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=ROWS)
    return ArrowFiles(folder / "digits.arrow")


def numpy(folder, pixels, digits):
    np.save(folder / "pixels.npy", pixels)
    np.save(folder / "digit.npy", digits)
    files = {"pixels": folder / "pixels.npy", "digit": folder / "digit.npy"}
    return NumpyFiles(files, rows_per_shard=ROWS)


def webdataset(folder, pixels, digits):
    for first in range(0, len(digits), ROWS):
        with tarfile.open(folder / f"digits-{first:05}.tar", "w") as archive:
            for number in range(first, min(first + ROWS, len(digits))):
                image, label = pixels[number].tobytes(), str(digits[number]).encode()
                for name, data in ((f"{number:05}.raw", image), (f"{number:05}.cls", label)):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))

    def decode(sample):  # a larger example would decode a JPEG here
        image = np.frombuffer(sample["raw"], np.float32).copy()
        return {"pixels": torch.from_numpy(image), "digit": int(sample["cls"])}

    return WebDatasetFiles(folder / "digits-*.tar", transform=decode)


def huggingface(folder, pixels, digits):
    import datasets

    datasets.Dataset.from_dict({"pixels": pixels, "digit": digits}).save_to_disk(folder)
    return datasets.load_from_disk(folder).with_format("torch")  # mapped, not read at once


FORMATS = {each.__name__: each for each in (parquet, arrow, numpy, webdataset, huggingface)}


def train(ctx, name, X, y):
    """Train on files of one format; the accuracy on the digits that are not in them."""
    torch.manual_seed(0)
    model = pt.DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), ctx)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        data = FORMATS[name](Path(folder), X[:NUM_TRAIN], y[:NUM_TRAIN])
        job = pt.ElasticLoop(model, optimizer, data, batch_size=50, epochs=15)
        for batch in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch["pixels"]), batch["digit"])
                loss.backward()
                job.log(loss=loss)
                optimizer.step()

    with torch.no_grad():
        found = model(torch.from_numpy(X[NUM_TRAIN:])).argmax(1)
    accuracy = (found == torch.from_numpy(y[NUM_TRAIN:])).double().mean().item()
    job.log(test_accuracy=accuracy)
    print(f"{name}: test accuracy {accuracy:.3f} after {job.committed} samples")
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["parquet"])
    args = parser.parse_args()

    torch.set_num_threads(1)
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    try:
        with potluck.init() as ctx:
            worst = min(train(ctx, name, X, y) for name in args.format)
    except ModuleNotFoundError as error:
        sys.exit(f"this format needs {error.name}: pip install 'potluck[data,ecosystem]'")
    if worst < 0.88:
        sys.exit("a test accuracy is below 0.88")


if __name__ == "__main__":
    main()
