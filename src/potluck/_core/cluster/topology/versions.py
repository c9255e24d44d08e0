"""The versions that a worker on this node runs with, and whether they fit those of another node."""

from __future__ import annotations

import functools
import platform
import sys

from potluck._core.optional import installed
from potluck._core.wire.names import Versions


@functools.cache
def own_versions() -> Versions:
    """The versions in this interpreter. Imports none of the packages; costs some milliseconds."""
    return Versions(
        python=platform.python_version(),
        potluck=installed("potluck"),
        torch=installed("torch").partition("+")[0],  # +cpu and +cu128 are one release
        numpy=installed("numpy"),
        machine=platform.machine(),
        byte_order=sys.byteorder,
        executable=sys.executable[:256] if sys.executable.isprintable() else "",
    )


def differences(name: str, mine: Versions, theirs: Versions) -> list[str]:
    """The differences because of which workers on the node ``name`` and here can't be in one job,
    in words, with what to do; empty if they can.

    Python must have the same major and minor version; torch, unless ``mine.torch`` is empty, and
    potluck must be the same release.
    """
    texts = []
    pip = f"there: {theirs.executable or 'python'} -m pip install"
    again = "and start its potluck up again"
    if _minor(mine.python) != _minor(theirs.python):
        texts.append(
            f"{name} has Python {theirs.python}, this node {mine.python} (there: uv venv --python "
            f"{_minor(mine.python)}, install potluck and the script's packages into it, {again})"
        )
    if mine.potluck != theirs.potluck:
        texts.append(
            f"{name} has potluck {theirs.potluck}, this node {mine.potluck} (install the same "
            f"release on both, {again})"
        )
    if mine.torch and mine.torch != theirs.torch:
        theirs_is = f"torch {theirs.torch}" if theirs.torch else "no torch"
        texts.append(
            f"{name} has {theirs_is}, this node {mine.torch} ({pip} torch=={mine.torch}, {again})"
        )
    if mine.byte_order != theirs.byte_order:
        texts.append(f"{name} is a {theirs.byte_order}-endian machine ({theirs.machine})")
    return texts


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
