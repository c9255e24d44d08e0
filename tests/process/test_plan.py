"""``potluck plan``: a script is measured, not trained, and "auto" takes what was chosen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.commands import Command, potluck_command, run_command

TRAIN = """
import torch
from torch import nn
from torch.nn import functional as F

import potluck.torch as pt

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(64, 20)
y = (x[:, 0] > 0).long()
model = pt.DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = pt.ElasticLoop(
    model, optimizer, (x, y), batch_size=8, strategy="auto", checkpoint="saved",
    callbacks=[lambda epoch, loss: print("an epoch has ended")],
)
for inputs, labels in job:
    with job.step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        job.log(loss=loss)
        optimizer.step()
print("trained", job.step_number, "steps")
"""


def plan_command(*arguments: str) -> Command:
    return Command([*potluck_command(), "plan", *arguments])


def test_a_plan_trains_nothing_and_auto_trains_by_it(tmp_path: Path) -> None:
    script, figures = tmp_path / "train.py", tmp_path / "figures.json"
    script.write_text(TRAIN)
    with run_command("--workers", "2", str(script)) as run:
        assert run.finish() == 1
        assert "make one with `potluck plan train.py`" in run.text
    with plan_command("--workers", "2", "--json", str(figures), str(script)) as plan:
        assert plan.finish() == 0, plan.text
        assert "choice: DataParallel(): all workers are on one machine" in plan.text
        assert "trained" not in plan.text
        assert "epoch" not in plan.text
    assert not (tmp_path / "saved").exists()
    made = json.loads(figures.read_text())
    assert made == json.loads((tmp_path / "train.plan.json").read_text())
    assert made["choice"] == "plain"
    assert len(made["measured"]["compute_s"]) == 2
    assert min(made["measured"]["bytes_per_s"]) > 1e6
    assert made["measured"]["shapes"] == [[32, 20], [32], [2, 32], [2]]

    made["choice"] = "local-sgd"  # as if the machines were far from each other
    (tmp_path / "train.plan.json").write_text(json.dumps(made))
    again = [*potluck_command(), "run", "--workers", "2", str(script)]
    with Command(again, cwd=tmp_path) as run:  # which leaves its checkpoint there
        assert run.finish() == 0, run.text
        assert "[0] trained 8 steps" in run.text
        facts = dict(re.split(r"  +", line, maxsplit=1) for line in run.lines if "  " in line)
        assert facts["strategy"] == "LocalSGD(every=8)", run.text
        assert facts["algorithm"], run.text


def test_a_module_is_planned_and_run_with_its_plan(tmp_path: Path) -> None:
    train = TRAIN.replace("import torch\n", "import torch, common\nfrom . import net\n", 1)
    for path, text in (
        ("src/pkg/train.py", train),
        ("src/pkg/net.py", "import common"),
        ("common.py", ""),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    words = ["--workers", "2", "--root", ".", "-m", "pkg.train"]
    with Command([*potluck_command(), "run", *words], cwd=tmp_path) as run:
        assert run.finish() == 1
        assert "make one with `potluck plan -m pkg.train`" in run.text
    with Command([*potluck_command(), "plan", *words], cwd=tmp_path) as plan:
        assert plan.finish() == 0, plan.text
    assert (tmp_path / "src" / "pkg" / "train.plan.json").is_file()
    with Command([*potluck_command(), "run", *words], cwd=tmp_path) as run:
        assert run.finish() == 0, run.text
        assert "[0] trained 8 steps" in run.text


def test_a_training_of_three_steps_has_a_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("64, 20", "24, 20"))
    with plan_command("--workers", "2", str(script)) as plan:
        assert plan.finish() == 0, plan.text
        assert "choice: DataParallel(): all workers are on one machine" in plan.text


@pytest.mark.parametrize("words", [("--on", "desk,attic"), ("--nodes", "2"), ("--min-nodes", "2")])
def test_machines_are_named_to_a_plan_on_a_cluster_only(words: tuple[str, str]) -> None:
    with plan_command(*words, __file__) as plan:
        assert plan.finish() == 2
        assert f"{' '.join(words)}: this machine is in no cluster" in plan.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('hello')\n", "nothing was measured: plans are for scripts that train with"),
        ("raise SystemExit(3)\n", "exit"),
    ],
)
def test_a_script_that_can_not_be_planned(tmp_path: Path, text: str, said: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    with plan_command(str(script)) as plan:
        assert plan.finish() != 0
        assert said in plan.text
    assert not (tmp_path / "script.plan.json").exists()
