"""Where PyTorch is not installed, files of tests that import it skip, and all others run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = {
    "hide_torch.py": 'import sys\nsys.modules["torch"] = None\n',
    "test_torch.py": "import torch\n\n\ndef test_it(): ...\n",
    "test_part.py": "from torch import nn\n\n\ndef test_it(): ...\n",
    "test_ours.py": "from potluck.torch import DDP\n\n\ndef test_it(): ...\n",
    "test_numpy.py": "import numpy\n\n\ndef test_it(): ...\n",
}


def test_files_that_import_torch_skip_without_it(tmp_path: Path) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "hide_torch", "-p", "no:cacheprovider", "."],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{TESTS}"},
    )
    assert "1 passed, 3 skipped" in run.stdout, run.stdout + run.stderr
    assert "needs PyTorch, which is not installed" in run.stdout
