"""DDP's built-in communication hook FP16_COMPRESS on potluck's groups, replaced by torch's Python
version of it.

The built-in hook is C++ and expects a C++ list of tensors in the future of an all_reduce. The
future of a group in Python holds a Python list, on which the hook fails with an internal assert of
torch. ``default_hooks.fp16_compress_hook`` computes the same result. torch has no extension point
for this, so the method of DDP that registers built-in hooks is replaced, for models on potluck's
groups.
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
    """Let DDP register the Python version on potluck's groups. Idempotent."""
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
