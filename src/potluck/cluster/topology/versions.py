"""The versions that a worker on this node runs with, and whether they fit those of another node."""

from __future__ import annotations

import functools
import platform
import sys

from potluck.optional import installed
from potluck.wire.names import Versions


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
    )


def differences(name: str, mine: Versions, theirs: Versions) -> list[str]:
    """The differences because of which workers on the node ``name`` and here can't be in one job,
    in words; empty if they can.

    Python must have the same major and minor version; torch and potluck must be the same release.
    """
    texts = []
    if _minor(mine.python) != _minor(theirs.python):
        texts.append(f"{name} has Python {theirs.python}, this node {mine.python}")
    if mine.potluck != theirs.potluck:
        texts.append(f"{name} has potluck {theirs.potluck}, this node {mine.potluck}")
    if mine.torch != theirs.torch:
        if not theirs.torch:
            texts.append(f"{name} has no torch, this node {mine.torch}")
        else:
            here = mine.torch or "none"
            texts.append(f"{name} has torch {theirs.torch}, this node {here}")
    if mine.byte_order != theirs.byte_order:
        texts.append(f"{name} is a {theirs.byte_order}-endian machine ({theirs.machine})")
    return texts


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
