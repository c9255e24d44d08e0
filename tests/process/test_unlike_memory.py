"""Workers of unlike memory, with real limits: what ended the job is trained, exactly."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.commands import run_command

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "unlike_memory.py"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="no limit of private memory")
def test_three_workers_of_unlike_memory_train_a_batch_that_fits_into_none() -> None:
    with run_command("--workers", "3", str(SCRIPT)) as run:
        assert run.finish() == 0, run.text
    ended = re.findall(
        r"worker of (\d+) MB: (\d) steps, at most (\d+) at once, (\d+) parts, (\d) steps", run.text
    )
    found = {int(size): tuple(map(int, rest)) for size, *rest in ended}
    assert found.keys() == {1200, 700, 500}, run.text
    changes = run.text.count("is out of memory with")
    for steps, most, parts, reruns in found.values():
        assert steps == 2, run.text
        assert most, "20 MB a sample: none has room for 20, or no longer"
        assert parts > steps, "60 samples are more than they have room for together"
        assert reruns <= changes, run.text
    assert found[500][1] < found[700][1], run.text
    difference = re.search(r"difference (\S+)", run.text)
    assert difference is not None, run.text
    assert float(difference[1]) < 1e-10, run.text
