"""What torch.distributed offers on top of the group leaves users' tensors what they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "user_tensors.py"
LINKS = {
    "shared memory": (2, {}),
    "native links": (2, {"POTLUCK_USE_SHARED_MEMORY": "0"}),
    "python links": (2, {"POTLUCK_USE_SHARED_MEMORY": "0", "POTLUCK_NATIVE": "0"}),
    "alone": (1, {}),
}


@pytest.mark.parametrize(
    "links",
    [
        pytest.param(links, marks=[pytest.mark.long] if links == "python links" else [])
        for links in LINKS
    ],
)
def test_tensors_can_be_resized_after_everything_that_torch_offers(
    links: str, tmp_path: Path
) -> None:
    num_workers, variables = LINKS[links]
    program = Path(sys.executable).with_name("potluck")
    run = subprocess.run(
        [
            *(str(program), "run", "--workers", str(num_workers)),
            *(str(SCRIPT), "potluck://"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"POTLUCK_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"} | variables,
    )
    assert run.returncode == 0, run.stdout + run.stderr
