"""Sharded tensors (DTensors), without importing torch.distributed.tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def groups_of(tensors: Iterable[Any]) -> list[Any]:
    """The process groups of the DTensors' meshes, each once, in the same order on all ranks."""
    groups = {
        group.group_name: group
        for tensor in tensors
        for group in tensor.device_mesh.get_all_groups()
    }
    return [groups[name] for name in sorted(groups)]
