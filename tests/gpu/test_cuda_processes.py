"""Worker processes that share a CUDA GPU: the process group, NCCL, and the planner.

Skipped where there is no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from support.commands import Command, potluck_command, run_command
from support.devices import DEVICE, needs_device
from support.ports import reserved_ports

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GROUP = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
for device in ("cuda", ("cuda", "cpu")[rank]):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for size in (0, 1, 1000, 3_000_000):
            mine = (torch.arange(size, device=device) % 7 + rank).to(dtype)
            right = (torch.arange(size, device=device) % 7 * 2 + 1).to(dtype)
            torch.cuda._sleep(20_000_000)  # what comes next must wait for the stream
            busy = mine.clone()
            dist.all_reduce(busy)
            assert torch.equal(busy, right), (device, dtype, size)
            works = [busy.clone().mul_(0).add_(mine) for _ in range(3)]
            for work in [dist.all_reduce(each, async_op=True) for each in works]:
                work.wait()
            assert all(torch.equal(each, right) for each in works), (device, dtype, size)
    mine = torch.full((1_500_000,), float(rank + 1), device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    assert [each[-1].item() for each in gathered] == [1.0, 2.0]
    whole = torch.empty(3_000_000, device=device)
    dist.all_gather_into_tensor(whole, mine)
    part = torch.empty(1_500_000, device=device)
    dist.reduce_scatter_tensor(part, whole)
    assert part.unique().tolist() == [2.0 * (rank + 1)]
    dist.broadcast(mine, 1)
    assert mine.unique().tolist() == [2.0]
    out, sent = torch.empty(10, device=device), torch.arange(10.0, device=device) + rank
    dist.all_to_all_single(out, sent)
    assert out[:5].tolist() == [5.0 * rank + each for each in range(5)]
    if rank == 0:
        dist.send(sent.t(), 1, tag=3)
    else:
        dist.recv(out, 0, tag=3)
        assert out.tolist() == list(range(10))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = torch.full((2_000_000,), 3.0, device=device)
        dist.all_reduce(late)
        assert late.unique().tolist() == [6.0]

torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
model = DistributedDataParallel(inner, device_ids=[0], bucket_cap_mb=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda") + rank).square().mean().backward()
    optimizer.step()
mine = torch.cat([each.detach().flatten() for each in model.parameters()])
theirs = mine.clone()
dist.broadcast(theirs, 0)
assert torch.equal(mine, theirs)
print("fine", rank, flush=True)
dist.destroy_process_group()
"""


@needs_cuda
def test_operations_of_the_process_group_on_tensors_of_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    with run_command("--workers", "2", str(script)) as run:
        assert run.finish() == 0, run.text
        assert {"[0] fine 0", "[1] fine 1"} <= set(run.lines)


TRAINING = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
import potluck
from potluck import BF16, FP16, Quantize, PowerSGD, RandomK, TopK
from potluck.torch import DDP, DiLoCo, ElasticLoop, Gossip, LocalSGD, Policy, OuterSGD

ctx = potluck.init()
device = torch.device(sys.argv[1:][ctx.rank])
x = torch.randn(192, 20, generator=torch.Generator().manual_seed(3))
y = torch.randint(0, 5, (192,), generator=torch.Generator().manual_seed(3))
for compression, strategy in (
    (None, None), (FP16(), None), (BF16(), None), (Quantize(bits=8), None),
    (Quantize(bits=4), None), (TopK(0.1), None), (RandomK(0.2), None),
    (PowerSGD(2, start_step=0, min_rate=1), None),
    (None, LocalSGD(every=4)), (None, DiLoCo(every=6, fragments=2, delay=1)),
    (None, DiLoCo(every=6, compression=TopK(0.1, bits=2))), (None, Gossip()),
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    model = DDP(model.to(device), ctx, compression=compression, bucket_size_mb=0.004)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = ElasticLoop(
        model, optimizer, (x, y), batch_size=24, epochs=6, seed=1, ctx=ctx, strategy=strategy,
        policy=Policy(hash_every=5),
    )
    for inputs, labels in job:
        with job.step():
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            job.log(loss=loss)
            optimizer.step()
    assert job.losses[-1] < job.losses[0]
    print("end:", compression or strategy, job.parameter_hash(), flush=True)
"""


@needs_cuda
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu")], ids="+".join)
def test_workers_end_equal_with_every_compression_and_strategy(
    tmp_path: Path, devices: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    with run_command("--workers", "2", str(script), *devices) as run:
        assert run.finish() == 0, run.text
        ends = [line.partition("end:")[2] for line in run.lines if "end:" in line]
        assert len(ends) == 24
        assert len(set(ends)) == 12, run.text
        assert any("rounds otherwise" in line for line in run.lines) == (devices[1] == "cpu")


LOADING = """
import os, sys, warnings
import numpy as np
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from potluck.errors import ForkedProcess

warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
device = torch.device(sys.argv[1])
dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()

def exact():
    for size in (10, 1_000_000):
        mine = torch.full((size,), rank + 1.0, device=device)
        dist.all_reduce(mine)
        assert (mine == 3.0).all()

class Samples(Dataset):
    def __init__(self, calls):
        self.calls = calls
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if self.calls:
            dist.all_reduce(torch.full((4,), 1000.0))
        return torch.tensor([float(index)])

options = {"batch_size": 4, "num_workers": 2, "pin_memory": device.type == "cuda"}
loads = DataLoader(Samples(False), persistent_workers=True, **options)
for _ in range(2):
    exact()
    total = torch.zeros(1, device=device)
    for batch in loads:
        assert batch.is_pinned() == options["pin_memory"]
        total += batch.to(device, non_blocking=True).sum()
        exact()  # amid loading
    assert total.item() == sum(range(24))
    try:
        list(DataLoader(Samples(True), **options))
    except ForkedProcess as error:
        assert f"belongs to process {os.getpid()}," in str(error), error
    else:
        raise AssertionError("a worker's collective was not refused")
    exact()
print("loaded", flush=True)

small = dist.new_group([0, 1])
dist.all_reduce(torch.ones(4, device=device), group=small)
dist.destroy_process_group(small)
held = None
for number in range(200):
    group = dist.new_group([0, 1])
    mine = torch.full((1000,), number + rank, device=device)
    dist.all_reduce(mine, group=group)
    assert (mine == 2 * number + 1).all(), number
    dist.destroy_process_group(group)
    if number == 20:
        held = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == held
exact()
print("made and destroyed", flush=True)
dist.destroy_process_group()
"""


@needs_device
def test_workers_of_a_loader_that_pins_memory_are_refused_and_groups_come_and_go(
    tmp_path: Path,
) -> None:
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    with run_command("--workers", "2", str(script), DEVICE) as run:
        assert run.finish() == 0, run.text
        assert {
            f"[{r}] {done}" for r in (0, 1) for done in ("loaded", "made and destroyed")
        } <= set(run.lines)


READING = """
import sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
import potluck
from potluck.data import NumpyFiles
from potluck.torch import DDP, ElasticLoop

ctx = potluck.init()
device, folder = torch.device(sys.argv[1]), Path(sys.argv[2]) / str(ctx.rank)
num = (900, 500)[ctx.rank]
folder.mkdir()
np.save(folder / "x.npy", np.random.default_rng(ctx.rank).normal(size=(num, 20)).astype("f4"))
np.save(folder / "y.npy", np.arange(num))
torch.ones(1, device=device)  # the GPU is in use before workers are forked
for workers in (0, 2):
    source = NumpyFiles({each: folder / f"{each}.npy" for each in "xy"}, rows_per_shard=100)
    model = DDP(nn.Linear(20, 1).to(device), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    job = ElasticLoop(
        model, optimizer, source, batch_size=100, epochs=3, ctx=ctx, samples="own",
        num_workers=workers,
    )
    for batch in job:
        with job.step():
            optimizer.zero_grad()
            x, y = (batch[each].to(device, non_blocking=True) for each in "xy")
            seen.append(y)
            model(x).square().mean().backward()
            optimizer.step()
    rows = torch.cat(seen).sort().values
    assert torch.equal(rows.cpu(), torch.arange(num).repeat_interleave(3)), rows
    print("read by", workers, flush=True)
"""


@needs_device
def test_each_row_of_files_that_are_read_ahead_reaches_the_gpu_once_per_epoch(
    tmp_path: Path,
) -> None:
    script = tmp_path / "reading.py"
    script.write_text(READING)
    with run_command("--workers", "2", str(script), DEVICE, str(tmp_path)) as run:
        assert run.finish() == 0, run.text
        assert {f"[{r}] read by {n}" for r in (0, 1) for n in (0, 2)} <= set(run.lines)


NCCL = """
import numpy as np, torch
import potluck
with potluck.init("nccl") as ctx:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        top = torch.full((33,), torch.finfo(dtype).max, dtype=dtype, device="cuda")
        assert torch.equal(ctx.all_reduce(top.clone(), "mean"), top), dtype
        assert torch.equal(ctx.reduce_scatter(top.clone().reshape(1, 33), "mean").ravel(), top)
    mine = torch.arange(1000.0, device="cuda")
    ctx.all_reduce(mine)
    ctx.broadcast(mine)
    assert torch.equal(ctx.all_gather(mine).reshape(-1), mine)
    ctx.barrier()
    print(type(ctx).__name__, ctx.world_size, mine.sum().item(), flush=True)
"""


@needs_cuda
def test_nccl_alone_on_a_gpu() -> None:
    """One GPU has room for one rank of NCCL."""
    with reserved_ports(1) as (port,):
        world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        with Command([sys.executable, "-c", NCCL], env={**world, "MASTER_PORT": str(port)}) as run:
            assert run.finish() == 0, run.text
            run.wait_for("DistributedContext 1 499500.0")


PLAN = """
import torch
from torch import nn
from torch.nn import functional as F
import potluck
from potluck.torch import DDP, ElasticLoop

ctx = potluck.init()
model = DDP(nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 10)).cuda(), ctx)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(4096, 2048), torch.randint(0, 10, (4096,))
job = ElasticLoop(model, optimizer, (x, y), batch_size=64, epochs=1, ctx=ctx)
for inputs, labels in job:
    with job.step():
        optimizer.zero_grad()
        inputs = inputs.cuda()
        for _ in range(200):  # queued at once, and computed long after
            hidden = model(inputs)
        loss = F.cross_entropy(hidden, labels.cuda())
        loss.backward()
        optimizer.step()
"""


@needs_cuda
def test_a_plan_counts_the_time_that_the_gpu_computes(tmp_path: Path) -> None:
    """A step that queues work returns before it is done: here after a tenth of the time."""
    script = tmp_path / "train.py"
    script.write_text(PLAN)
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    model = torch.nn.Sequential(
        torch.nn.Linear(2048, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 10)
    ).cuda()
    x = torch.randn(64, 2048, device="cuda")
    for _ in range(3):
        begins.record()
        for _ in range(200):
            model(x)
        ends.record()
        torch.cuda.synchronize()
    least_s = begins.elapsed_time(ends) / 1000
    path = tmp_path / "plan.json"
    with Command(
        [*potluck_command(), "plan", "--workers", "1", "--json", str(path), str(script)]
    ) as run:
        assert run.finish() == 0, run.text
    plan = json.loads(path.read_text())
    assert plan["measured"]["compute_s"][0] > 0.7 * least_s, (
        plan["measured"]["compute_s"],
        least_s,
    )
