"""Estimators in worker processes of ``potluck run``: the example, and a worker that is killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from support.commands import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"

FIT = """
import hashlib
import numpy as np
import potluck
from potluck.estimators import KMeans

ctx = potluck.init()
X = np.random.default_rng(ctx.rank).normal(size=(20_000, 10))
model = KMeans(20, max_iter=30, tol=0, random_state=0, ctx=ctx).fit(X)
print("iterations", model.n_iter_, hashlib.sha256(model.cluster_centers_.tobytes()).hexdigest())
"""

BOOST = """
import hashlib
import numpy as np
import potluck
from potluck.estimators import HistGradientBoostingRegressor

ctx = potluck.init()
X = np.random.default_rng(ctx.rank).normal(size=(5_000, 5))
model = HistGradientBoostingRegressor(max_iter=20, random_state=0, ctx=ctx)
model.fit(X, X[:, 0] * X[:, 1])
nodes = b"".join(tree.nodes.tobytes() for [tree] in model._predictors)
print("iterations", model.n_iter_, hashlib.sha256(nodes).hexdigest())
"""


def test_the_example_classifies_digits_on_three_workers() -> None:
    with run_command("--workers", "3", str(EXAMPLES / "estimators.py")) as run:
        assert run.finish() == 0
        assert any(line.startswith("[0] logistic regression: test accuracy") for line in run.lines)


@pytest.mark.parametrize("strategy", ["data_parallel", "federated", "model_parallel"])
def test_the_example_of_trainers_classifies_digits_on_two_workers(strategy: str) -> None:
    pytest.importorskip("torch")
    script = str(EXAMPLES / "trainers.py")
    with run_command("--workers", "2", script, "--strategy", strategy) as run:
        assert run.finish() == 0
        for model in ("network", "forest"):
            assert any(line.startswith(f"[0] {model}: test accuracy 0.") for line in run.lines)


def test_the_example_searches_by_a_queue_of_tasks_on_three_workers() -> None:
    with run_command("--workers", "3", str(EXAMPLES / "work_queue.py")) as run:
        assert run.finish() == 0
        assert sum("accuracy 0." in line for line in run.lines) == 12 + 1


def test_the_example_of_messages_classifies_digits_that_lie_in_unequal_parts() -> None:
    with run_command("--workers", "3", str(EXAMPLES / "messages.py")) as run:
        assert run.finish() == 0
        assert any(line.startswith("[0] test accuracy 0.8") for line in run.lines)
        has = re.findall(r"rank (\d) has (\d+) digits: (.*)", run.text)
        assert sum(int(count) for _, count, _ in has) == 1400
        assert len({kinds for *_, kinds in has}) == 3, "unlike on each"


SEARCH = """
import os
import numpy as np
import potluck
from potluck.estimators import PCA
from sklearn.model_selection import GridSearchCV

ctx = potluck.init()
print("process", os.getpid(), flush=True)
X = np.random.default_rng(ctx.rank).normal(size=(100, 4))
search = GridSearchCV(PCA(ctx=ctx), {"n_components": [1, 2]}, cv=2, n_jobs=2)
if ctx.rank == 0:
    search.fit(X)
ctx.barrier(timeout=200)  # joblib's processes import for long
"""


def test_a_search_in_processes_of_a_worker_is_told_what_to_change(tmp_path: Path) -> None:
    script = tmp_path / "search.py"
    script.write_text(SEARCH)
    with run_command("--workers", "2", str(script)) as run:
        assert run.finish() == 1
        assert "worker 0 is connected already" in run.text
        assert "leave n_jobs at 1" in run.text
        processes = re.findall(r"process (\d+)", run.text)
    # The worker that ends last is stopped, and joblib's own process, which would remove its
    # semaphores, with it.
    for process in processes:
        for path in Path("/dev/shm").glob(f"sem.loky-{process}-*"):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(("fit", "num"), [(FIT, 30), (BOOST, 20)], ids=["k-means", "boosting"])
def test_a_killed_worker_costs_one_repeated_iteration(tmp_path: Path, fit: str, num: int) -> None:
    script, summary = tmp_path / "fit.py", tmp_path / "summary.json"
    script.write_text(fit)
    with run_command(
        *("--workers", "3", "--chaos", "kill rank 1 at step 12", "--json", str(summary)),
        str(script),
    ) as run:
        assert run.finish() == 0
        told = [line for line in run.lines if "iterations" in line]
    results = {re.sub(r"^\[\d+\] ", "", line) for line in told}
    assert len(told) >= 2
    assert len(results) == 1, "all workers have the same model"
    assert results.pop().startswith(f"iterations {num} ")
    assert json.loads(summary.read_text())["steps_run_again"] <= 1
