"""Estimators on a new machine and an old one, whose processors round differently."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from support.commands import run_command
from support.unlike import old_processor

pytestmark = pytest.mark.real_exec  # libraries look at the processor while they are loaded

FITS = """
import hashlib, warnings
import numpy as np
import potluck
from potluck import estimators, parameter_server
from sklearn.datasets import load_digits

warnings.filterwarnings("ignore", "Stochastic Optimizer")
warnings.filterwarnings("ignore", "L-BFGS failed to converge")
ctx = potluck.init()
mine = slice(ctx.rank, 600, 2)
X, y = load_digits(return_X_y=True)
weights = np.random.RandomState(1).random_sample(len(X))
few = X[:40] + weights[:40] @ np.outer(weights[:40], X[0] / 1000)  # a dot product of each rank's
X, y, weights = X[mine] / 16, y[mine], weights[mine]
ties = np.random.RandomState(ctx.rank).randint(0, 4, (200, 3)).astype(float)
RATE = 0.11800000000000001  # the power of 6 by it differs, and 0.9989**3
FITS = {
    "KMeans": lambda: estimators.KMeans(40, init=few / 16, max_iter=3).fit(X),
    "MiniBatchKMeans": lambda: estimators.MiniBatchKMeans(
        40, batch_size=8, reassignment_ratio=0.9, max_iter=3, random_state=0
    ).fit(ties),
    "LogisticRegression": lambda: estimators.LogisticRegression(
        class_weight={number: 0.1 + number / 7 for number in range(10)}, max_iter=10
    ).fit(X, y, sample_weight=weights),
    "SGDClassifier": lambda: estimators.SGDClassifier(
        learning_rate="invscaling", power_t=RATE, random_state=0, max_iter=2, tol=None
    ).fit(X, y),
    "MLPClassifier": lambda: estimators.MLPClassifier((20,), random_state=0, max_iter=20).fit(
        X.astype(np.float32), y
    ),
    "MLPRegressor": lambda: estimators.MLPRegressor(
        (20,), alpha=0, beta_2=0.9989, random_state=0, max_iter=5
    ).fit(X, weights),
    "PCA": lambda: estimators.PCA(0.9).fit(X),
    "RandomForestClassifier": lambda: estimators.RandomForestClassifier(
        3, exact=True, criterion="entropy", random_state=0
    ).fit(ties, y[:200], sample_weight=weights[:200]),
}
FOUND = {
    "KMeans": ["cluster_centers_"],
    "MiniBatchKMeans": ["cluster_centers_"],
    "LogisticRegression": ["coef_"],
    "SGDClassifier": ["coef_"],
    "MLPClassifier": ["coefs_", "loss_curve_"],
    "MLPRegressor": ["coefs_", "loss_curve_"],
    "PCA": ["components_"],
    "RandomForestClassifier": ["feature_importances_"],
}
for name, fit in FITS.items():
    model = fit()
    found = [np.concatenate([np.ravel(each) for each in getattr(model, n)]) for n in FOUND[name]]
    print("found", name, hashlib.sha256(np.concatenate(found).tobytes()).hexdigest())

adam = parameter_server.Adam(0.01, beta2=0.9989)
numbers = np.random.RandomState(0).random_sample((4, 100))
made, _ = adam.step(numbers[0], numbers[1], {"mean": numbers[2], "square": numbers[3]}, 3, 0.01)
print("found a copy on a parameter server", hashlib.sha256(made.tobytes()).hexdigest())
"""


def test_estimators_are_equal_on_unlike_processors(tmp_path: Path) -> None:
    script = tmp_path / "fits.py"
    script.write_text(FITS)
    with run_command("--workers", "2", str(script), **old_processor(tmp_path / "old")) as run:
        assert run.finish() == 0
        found = [
            [line[4:] for line in run.lines if line.startswith(f"[{rank}] found")] for rank in "01"
        ]
    assert len(found[0]) == 9
    assert found[0] == found[1]
