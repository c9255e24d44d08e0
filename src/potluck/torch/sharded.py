"""Tensors of which each rank holds a part (DTensors), without importing what makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; torch.distributed.tensor is not imported for the question."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def groups_of(tensors: Iterable[Any]) -> list[Any]:
    """The process groups of the meshes that these DTensors live on, each once, in a fixed order."""
    groups = {
        group.group_name: group
        for tensor in tensors
        for group in tensor.device_mesh.get_all_groups()
    }
    return [groups[name] for name in sorted(groups)]
