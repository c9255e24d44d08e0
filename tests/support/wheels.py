"""The wheels of `make wheels`."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from potluck._core.version import VERSION
from support.components import ROOT, program


@functools.cache
def wheels_of(arch: str) -> tuple[Path, ...]:
    """The wheels of this tree for ``arch``: built now, unless they are newer than their parts."""
    newest = max(
        each.stat().st_mtime
        for folder in ("src", "native/core", "tools")
        for each in (ROOT / folder).rglob("*")
        if each.is_file() and each.suffix in ("", ".py", ".cpp", ".hpp", ".pyi")
    )
    pattern = f"dist/potluck-{VERSION}-*_{arch}.whl"
    found = sorted(ROOT.glob(pattern))
    if not found or min(each.stat().st_mtime for each in found) < newest:
        program("dpkg-source", "dpkg-dev")
        subprocess.run(["tools/wheels", arch], cwd=ROOT, check=True)
        found = sorted(ROOT.glob(pattern))
    return tuple(found)
