"""Trainers in worker processes of ``potluck run``, one of which is killed while it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")
pytest.importorskip("torch")

from support.commands import run_command

TRAIN = """
import os, signal, sys
import numpy as np, torch
import potluck
from potluck import AggregationMethod, TrainingStrategy
from sklearn.datasets import load_digits

strategy, aggregation, victim = sys.argv[1:]
ctx = potluck.init()
me = ctx.group.me.worker
X, y = load_digits(return_X_y=True)
X /= 16
start, end = potluck.DataPartitioner(1400, 3).get_partition(int(me) % 3)
steps = 0
lives = os.path.join(os.environ["FOLDER"], "killed")

def loss(found, wanted):
    global steps
    steps += 1
    if me == victim and steps == 25 and not os.path.exists(lives):
        open(lives, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(found, wanted)

options = {}
if aggregation != "none":
    options["aggregation"] = AggregationMethod[aggregation]
with potluck.DistributedNeuralNetTrainer(
    ctx, TrainingStrategy[strategy], input_dim=64, hidden_dims=[64, 32], output_dim=10,
    loss=loss, **options,
) as net:
    value = net.train(X[start:end], y[start:end], epochs=6)
    if ctx.rank == 0:
        print("loss", net.get_global_loss() == value)
right = (net.predict(X[1400:]).argmax(axis=1) == y[1400:]).mean()
import hashlib
print("accuracy", right, hashlib.sha256(net.predict(X[1400:]).tobytes()).hexdigest(), flush=True)
"""

CASES = [
    ("DATA_PARALLEL", "none", "1"),
    ("DECENTRALIZED", "none", "1"),
    ("FEDERATED", "none", "1"),
    ("PARAMETER_SERVER", "SYNCHRONOUS", "1"),
    ("PARAMETER_SERVER", "ASYNCHRONOUS", "1"),
    ("PARAMETER_SERVER", "ELASTIC_AVERAGING", "2"),
    ("PARAMETER_SERVER", "SYNCHRONOUS", "0"),
    ("PARAMETER_SERVER", "ASYNCHRONOUS", "0"),
]


@pytest.mark.parametrize(("strategy", "aggregation", "victim"), CASES)
def test_the_others_train_to_the_end_when_a_worker_is_killed(
    strategy: str, aggregation: str, victim: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    arguments = ("--workers", "3", "--max-restarts", "0", str(script))
    with run_command(*arguments, strategy, aggregation, victim, FOLDER=str(tmp_path)) as run:
        run.finish()
        found = re.findall(r"accuracy (\S+) (\w+)", run.text)
        assert (tmp_path / "killed").exists()
        assert len(found) == 2, run.text
        assert {digest for _, digest in found} == {found[0][1]}
        assert float(found[0][0]) > 0.75
        assert "loss True" in run.text


COUNT = """
import os, signal, sys
from collections import Counter
import numpy as np, torch
import potluck
from potluck import TrainingStrategy

strategy, victim, step = sys.argv[1:]
ctx = potluck.init()
me = ctx.group.me.worker
num = (70, 45, 56)[int(me) % 3]
X = np.arange(num, dtype=np.float64)[:, None]
seen, steps = Counter(), 0

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        global steps
        steps += 1
        seen.update(x[:, 0].int().tolist())
        if (me, steps) == (victim, int(step)):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x / num)

with potluck.DistributedNeuralNetTrainer(
    ctx, TrainingStrategy[strategy], model=Counting(), batch_size=19
) as net:
    net.train(X, X / num, epochs=2)
print("seen", seen == Counter({row: 2 for row in range(num)}), dict(seen), flush=True)
"""


@pytest.mark.parametrize(("victim", "step"), [("0", 1), ("1", 5), ("1", 9), ("0", 10), ("0", 18)])
def test_each_sample_of_the_others_counts_once_per_epoch_of_a_training_in_rounds(
    victim: str, step: int, tmp_path: Path
) -> None:
    """The victim ends in an epoch's first step, inside it, in its last, and in the last of all."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    arguments = ("--workers", "3", "--max-restarts", "0", str(script))
    with run_command(*arguments, "DECENTRALIZED", victim, str(step)) as run:
        run.finish()
        found = re.findall(r"seen (\w+) (.*)", run.text)
        assert [right for right, _ in found] == ["True", "True"], run.text
