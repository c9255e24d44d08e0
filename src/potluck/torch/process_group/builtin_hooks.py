"""DDP's built-in hook FP16_COMPRESS on potluck's groups: its twin in Python takes its place.

The built-in hook is C++ and wants a C++ list of tensors in the future of an all_reduce. The future
of a group written in Python holds a Python list, and the hook would end in an internal assert of
torch's. ``default_hooks.fp16_compress_hook`` computes the same. Torch offers no place to say so,
thus the method of DDP that registers built-in hooks is replaced, for models on potluck's groups.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from potluck.torch.process_group.group import PotluckProcessGroup


@functools.cache
def replace_builtin_hooks() -> None:
    """Have DDP register the Python twin on potluck's groups from now on. Idempotent."""
    model: Any = DistributedDataParallel  # torch's stubs know no types here
    register = model._register_builtin_comm_hook

    @functools.wraps(register)
    def replaced(self: DistributedDataParallel, comm_hook_type: Any) -> None:
        is_ours = isinstance(self.process_group, PotluckProcessGroup)
        if is_ours and comm_hook_type == BuiltinCommHookType.FP16_COMPRESS:
            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        else:
            register(self, comm_hook_type)

    model._register_builtin_comm_hook = replaced
