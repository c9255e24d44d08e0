"""The digits example in real processes: deterministic alone, the same on four workers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.examples import EXAMPLES, example

if importlib.util.find_spec("sklearn") is None:  # it isn't imported: that takes a second
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)

EXAMPLE = EXAMPLES / "digits.py"

RECORDER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import digits
job = digits.main({arguments!r})
told = {{"losses": job.losses, "hash": job.parameter_hash(), "world": job.ctx.world_size}}
Path({results!r}, f"{{job.ctx.rank}}.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return example("digits")


def test_four_workers_have_the_loss_curve_of_one_and_one_is_deterministic(
    digits: ModuleType, tmp_path: Path
) -> None:
    """Real processes, TLS and all; float64, so that only the order of additions differs."""
    options = ["--dtype", "float64", "--epochs", "2", "--require-accuracy", "0"]
    alone, again = digits.main(options), digits.main(options)
    for job in (alone, again):
        job.ctx.close()
    assert alone.losses == again.losses
    assert alone.parameter_hash() == again.parameter_hash()
    assert len(alone.losses) == 46

    script = tmp_path / "record.py"
    text = RECORDER.format(folder=str(EXAMPLE.parent), arguments=options, results=str(tmp_path))
    script.write_text(text)
    potluck = Path(sys.executable).with_name("potluck")
    subprocess.run(
        [potluck, "run", "--workers", "4", script],
        check=True,
        timeout=200,
        stdout=subprocess.DEVNULL,
    )
    workers = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
    assert [worker["world"] for worker in workers] == [4] * 4
    for worker in workers:
        assert worker["losses"] == pytest.approx(alone.losses, rel=1e-9)
        assert worker["hash"] == workers[0]["hash"]
