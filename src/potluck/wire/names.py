"""The bounded words that messages between agents are made of."""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Versions(msgspec.Struct, frozen=True):
    """What a worker would run with. ``torch`` is empty where it is not installed."""

    python: Name
    potluck: Name
    torch: Name
    numpy: Name
    machine: Name
    byte_order: Name = "little"
