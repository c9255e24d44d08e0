"""A plan for two machines with a narrow link between them, and a training by it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.hosts import Network
from support.machines import form, machines

pytestmark = pytest.mark.needs_root_netns

TRAIN = """
import torch
from torch import nn
from torch.nn import functional as F

import potluck.torch as pt

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(400, 512)
y = (x[:, 0] > 0).long()
model = pt.DDP(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = pt.ElasticLoop(model, optimizer, (x, y), batch_size=4, strategy="auto")
for inputs, labels in job:
    with job.step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
print("trained", job.step_number, "steps")
"""


@pytest.mark.long
def test_a_plan_over_a_narrow_link_takes_what_sends_less(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    script, figures = folder / "train.py", tmp_path / "figures.json"
    script.write_text(TRAIN)
    with Network(2, rate="20mbit") as network, machines(network, tmp_path) as (ada, bob):
        form(ada, bob)
        words = [*potluck_command(), "plan", "--json", str(figures), str(script)]
        with Command(ada.host.command(words), env=ada.environment) as plan:
            assert plan.finish(120) == 0, plan.text
        made = json.loads(figures.read_text())
        assert set(made["measured"]["nodes"]) == {ada.node, bob.node}
        rate = min(made["measured"]["bytes_per_s"]) * 8 / 1e6
        assert 10 < rate < 25, f"{rate} Mbit/s"
        steps = {each["name"]: each["predicted_step_s"] for each in made["strategies"]}
        num_bytes = 4 * (512 * 1024 + 1024 + 2 * 1024 + 2)
        assert steps["plain"] > num_bytes / 2.5e6  # of two ranks each sends all of it
        assert steps[made["choice"]] < steps["plain"] / 5
        with ada.run(str(script)) as run:
            assert run.finish(120) == 0, run.text
            assert "trained" in run.text


def test_a_script_is_planned_with_the_files_and_variables_that_it_is_run_with(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    (folder / ".gitignore").write_text("data/\n")
    (folder / "data" / "input.txt").write_text("512")
    script = folder / "train.py"
    begins = "import os\nassert open('data/input.txt').read() == os.environ['WIDTH']\n"
    script.write_text(begins + TRAIN)
    with Network(2) as network, machines(network, tmp_path) as (ada, bob):
        form(ada, bob)
        options = ["--include", "data/input.txt", "--env", "WIDTH=512", "--min-nodes", "2"]
        done = subprocess.run(
            ada.host.command([*potluck_command(), "plan", *options, str(script)]),
            cwd=folder,
            env=ada.variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "choice: " in done.stdout
    assert "potluck: " not in done.stdout, "the result is by itself"
    assert "measuring links and what compressing costs" in done.stderr
    assert re.search(r"rehearsing DataParallel\(\) \(1 of \d+\)", done.stderr)
    assert (folder / "train.plan.json").is_file()


def test_a_plan_of_some_machines_measures_these(tmp_path: Path) -> None:
    folder, figures = tmp_path / "work", tmp_path / "figures.json"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    with Network(3) as network, machines(network, tmp_path) as (ada, bob, carl):
        form(ada, bob, carl)
        words = ["--on", f"carl,{ada.id}", "--json", str(figures), str(folder / "train.py")]
        done = ada.runs("plan", *words)
        assert done.returncode == 0, done.stderr
        assert set(json.loads(figures.read_text())["measured"]["nodes"]) == {ada.node, carl.node}
        wrong = ada.runs("plan", "--on", "attic", str(folder / "train.py"))
        assert wrong.returncode == 2
        assert "attic" in wrong.stderr
