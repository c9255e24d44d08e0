"""The bounded types of fields in messages between agents."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.printable import MAX_NAME, PRINTABLE

Name = Annotated[str, msgspec.Meta(max_length=256, pattern=PRINTABLE)]
MachineName = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Versions(msgspec.Struct, frozen=True):
    """The versions with which a node runs workers. ``torch`` is empty if it is not installed, or,
    in a job, if the script does not use it. ``executable`` is the path of Python."""

    python: Name
    potluck: Name
    torch: Name
    numpy: Name
    machine: Name
    byte_order: Name = "little"
    executable: Name = ""


MAX_PAIRS = 1024
Pairs = Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=MAX_PAIRS)]
"""Pairs of workers."""
