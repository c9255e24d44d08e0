"""`import potluck` is cheap and brings nothing heavy; missing PyTorch costs only what needs it."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "numpy", "pydantic", "pydantic_settings", "cryptography", "ssl", "asyncio"),
    *("prometheus_client", "sklearn", "rich", "typer", "safetensors", "psutil"),
)
CPU_LIMIT_S = 0.3


def python(script: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_potluck_loads_nothing_heavy() -> None:
    loaded = python("import sys, potluck; print(*sys.modules)").split()
    assert "potluck" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_import_potluck_takes_less_than_the_promised_cpu_time() -> None:
    script = "import time; t = time.process_time(); import potluck; print(time.process_time() - t)"
    seconds = [float(python(script)) for _ in range(5)]
    assert statistics.median(seconds) < CPU_LIMIT_S, seconds


def test_the_whole_public_face_but_torch_is_reachable_without_importing_torch() -> None:
    script = (
        "import sys, potluck\n"
        "for name in potluck.__all__:\n"
        "    if name != 'torch' and not name.endswith('Trainer'):\n"
        "        getattr(potluck, name)\n"
        "print('torch' in sys.modules)"
    )
    assert python(script).strip() == "False"


WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import potluck
"""


def test_without_pytorch_everything_else_still_imports() -> None:
    script = WITHOUT_TORCH + (
        "for name in potluck.__all__:\n"
        "    if name != 'torch' and not name.endswith('Trainer'):\n"
        "        getattr(potluck, name)\n"
        "print('reached')"
    )
    assert python(script).strip() == "reached"


@pytest.mark.parametrize("reach", ["potluck.torch", "__import__('potluck.torch')"])
def test_without_pytorch_potluck_torch_says_which_command_brings_it(reach: str) -> None:
    script = WITHOUT_TORCH + (
        f"try:\n    {reach}\nexcept potluck.errors.MissingDependency as error:\n    print(error)"
    )
    assert "pip install 'potluck[torch]'" in python(script)
