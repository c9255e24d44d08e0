"""A worker on an old processor: one that rounds otherwise than those of the other ranks.

Libraries choose their routines by what the processor can do, and may be told that it can do less.
So torch and the C library work without fused multiply-add, and BLAS, oneDNN and NumPy with narrow
vectors. That rounds as a processor of 2008 does.
"""

from __future__ import annotations

from pathlib import Path

_START = """\
import os
import sys

if os.environ.get("RANK") == "1" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
    os.environ["OPENBLAS_CORETYPE"] = "Prescott"
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = "SSE4_2"
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    os.environ["NPY_DISABLE_CPU_FEATURES"] = "X86_V3 X86_V4"
    os.environ["GLIBC_TUNABLES"] = "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX2_Usable,-FMA_Usable"
    if sys.platform == "linux":
        os.execv(sys.executable, sys.orig_argv)  # glibc reads this when a program begins
"""


def old_processor(folder: Path) -> dict[str, str]:
    """The environment of a ``potluck run`` whose rank 1 is on an old processor. Python reads the
    file that this writes to ``folder`` when it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_START)
    return {"PYTHONPATH": str(folder)}
