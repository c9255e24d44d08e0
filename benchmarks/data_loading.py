"""Samples that take long to decode, and files larger than memory: what the loop waits for them.

    python benchmarks/data_loading.py decoding
    python benchmarks/data_loading.py parquet --gigabytes 10
    python benchmarks/data_loading.py parquet --save     # keep the result in benchmarks/results/

``decoding``: each sample is a wait of 20 ms, as for a slow disk or a decoder with cores of its own,
and the computation of a step is a wait of a known time. So what is measured is how much of the
loading is hidden behind the computation, not how fast this machine decodes.

``parquet``: one epoch over files of random numbers. Printed is how much memory the process took at
its peak above what it took after the first step of the same training on samples in memory.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import results
from common.script import Page
from torch import nn
from torch.nn import functional as F

from potluck.cli.bench.machine import heading, machine
from potluck.data import ParquetFiles
from potluck.torch import ElasticLoop

DECODE_S, COMPUTE_S, BATCH, STEPS = 0.020, 0.100, 16, 60
FEATURES, ROWS_PER_GROUP, GROUPS_PER_FILE = 256, 16384, 32


class Slow(torch.utils.data.Dataset[int]):
    """Samples that take 20 ms each."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> int:
        time.sleep(DECODE_S)
        return index


def decoding(page: Page) -> dict[str, Any]:
    page.say(
        f"{BATCH} samples a step, {DECODE_S * 1000:.0f} ms each; {COMPUTE_S * 1000:.0f} ms a step"
    )
    found = {}
    for num_workers in (0, 2, 4, 8):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        job = ElasticLoop(model, optimizer, Slow(), batch_size=BATCH, num_workers=num_workers)
        ends = []
        for _ in job:
            with job.step():
                time.sleep(COMPUTE_S)
            ends.append(time.perf_counter())
        steps = np.diff(ends[8:])  # the first ones find nothing loaded yet
        median = statistics.median(steps.tolist())
        page.say(
            f"{num_workers} workers: {median * 1000:6.1f} ms a step (median), "
            f"{np.mean(steps) * 1000:6.1f} (mean), {median / COMPUTE_S:.3f} of the computation"
        )
        found[str(num_workers)] = steps.tolist()
    return {"decode_s": DECODE_S, "compute_s": COMPUTE_S, "batch": BATCH, "step_s": found}


def write(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Parquet files of this size in sum; returns the number of samples and of bytes."""
    random = np.random.default_rng(0)
    num_rows = num_bytes = number = 0
    while num_bytes < gigabytes * 1e9:
        path = folder / f"train-{number:03}.parquet"
        kind = pa.list_(pa.float32(), FEATURES)
        schema = pa.schema({"x": kind, "y": pa.int64()})
        with pq.ParquetWriter(path, schema, compression="NONE") as writer:
            left = math.ceil((gigabytes * 1e9 - num_bytes) / (ROWS_PER_GROUP * FEATURES * 4))
            for _ in range(min(GROUPS_PER_FILE, left)):
                num_rows += ROWS_PER_GROUP
                x = random.standard_normal(ROWS_PER_GROUP * FEATURES, dtype=np.float32)
                y = x.reshape(-1, FEATURES)[:, 0] > 0
                columns = [pa.FixedSizeListArray.from_arrays(x, FEATURES), pa.array(y, pa.int8())]
                batch = pa.table([columns[0], columns[1].cast(pa.int64())], schema=schema)
                writer.write_table(batch, row_group_size=ROWS_PER_GROUP)
        num_bytes += path.stat().st_size
        number += 1
        print(f"\rwriting: {num_bytes / 1e9:.1f} of {gigabytes:g} GB", end="", flush=True)
    print()
    return num_rows, num_bytes


def train(dataset: Any, batch_size: int) -> tuple[float, float]:
    """One epoch; the last loss, and the highest memory of the process in bytes."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ElasticLoop(model, optimizer, dataset, batch_size=batch_size)
    process, most = psutil.Process(), 0
    began = shown = time.monotonic()
    for batch in job:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        with job.step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            job.log(loss=loss)
            optimizer.step()
        most = max(most, process.memory_info().rss)
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            part = job.committed / len(dataset) if isinstance(dataset, ParquetFiles) else 1.0
            print(f"\r{part:4.0%} after {shown - began:.0f} s", end="", flush=True)
    return job.last_loss, most


def parquet(page: Page, gigabytes: float, folder: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        num_rows, num_bytes = write(Path(place), gigabytes)
        few = torch.randn(4096, FEATURES), torch.zeros(4096, dtype=torch.int64)
        data = ParquetFiles(place)
        _, before = train(few, 1024)
        began = time.monotonic()
        loss, most = train(data, 1024)
        seconds = time.monotonic() - began
    print()
    page.say(
        f"{num_bytes / 1e9:.1f} GB, {num_rows:,} samples in {seconds:.0f} s "
        f"({num_bytes / 1e6 / seconds:.0f} MB/s): {(most - before) / 1e6:.0f} MB of memory above "
        f"the same training in memory; loss {loss:.3f}"
    )
    return {
        "bytes": num_bytes,
        "samples": num_rows,
        "seconds": seconds,
        "memory_above_bytes": most - before,
        "loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("decoding", "parquet"))
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", help="where the files go for the time of the run")
    results.add_option(parser)
    arguments = parser.parse_args()
    page, facts = Page(), machine("pyarrow")
    page.say(heading(facts))
    if arguments.part == "decoding":
        found = decoding(page)
    else:
        found = parquet(page, arguments.gigabytes, arguments.folder)
    result = {"benchmark": f"data_loading-{arguments.part}", "machine": facts} | found
    results.keep(arguments.save, result, page.lines)


if __name__ == "__main__":
    main()
