"""A new machine and an old one, whose processors round differently, train one model."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from support.commands import run_command
from support.unlike import old_processor

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="the old processor is an x86-64 one"
    ),
    pytest.mark.real_exec,  # torch looks at the processor while it is loaded
]

SCRIPT = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
import potluck
from potluck import PowerSGD, TopK
from potluck.torch import DDP, DiLoCo, ElasticLoop, LocalSGD, Policy

ctx, random = potluck.init(), np.random.default_rng(0)
x = torch.from_numpy(random.standard_normal((240, 20)).astype(np.float32))
y = torch.from_numpy(random.integers(0, 5, 240))
print("capability", ctx.rank, torch.backends.cpu.get_cpu_capability(), flush=True)
rounds = dict(every=6, outer=potluck.torch.OuterSGD(0.7, 0.9))
for name, compression, strategy in (
    ("plain", None, None),
    ("top-k", TopK(0.1), None),
    ("powersgd", PowerSGD(2, start_step=0, min_rate=1), None),
    ("local SGD", None, LocalSGD(every=5)),
    ("DiLoCo", None, DiLoCo(fragments=2, delay=2, **rounds)),
    ("SparseLoCo", None, DiLoCo(compression=TopK(0.1, bits=2), **rounds)),
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    model = DDP(model, ctx, compression=compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = ElasticLoop(
        model, optimizer, (x, y), batch_size=24, epochs=3, seed=1, ctx=ctx, strategy=strategy,
        policy=Policy(hash_every=10),
    )
    for inputs, labels in job:
        with job.step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            job.log(loss=loss)
            optimizer.step()
    print("end of", name, job.parameter_hash(), flush=True)
"""


def test_every_strategy_ends_with_equal_parameters(tmp_path: Path) -> None:
    """Without an alignment the first comparison of hashes would end the first training."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with run_command("--workers", "2", str(script), **old_processor(tmp_path / "old")) as run:
        assert run.finish() == 0, run.text
        text = run.text
    ends = re.findall(r"end of (.+) (\w{64})", text)
    assert len(ends) == 12
    assert len({name for name, _ in ends}) == len(set(ends)) == 6
    assert "rank 1 rounds otherwise than rank 0, and takes over its parameters now" in text
    capabilities = dict(re.findall(r"capability (\d) (\w+)", text))
    assert capabilities["1"] == "DEFAULT" != capabilities["0"]
