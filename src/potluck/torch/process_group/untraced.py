"""A class decorator that excludes methods from torch.compile.

While a compiled model runs, dynamo traces every Python frame, also the group's methods when torch's
C++ code (DDP) calls them. It can't trace threads and sockets.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def untraced(kind: _Class) -> _Class:
    """Exclude all plain methods of ``kind``, and the functions that they call, from tracing."""
    dynamo: Any = eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):  # older torch is refused later, in creation.py
        skip = dynamo._FrameAction.SKIP
        for value in vars(kind).values():
            if isinstance(value, types.FunctionType):
                strategy = dynamo._FrameExecStrategy(skip, skip)
                dynamo.set_code_exec_strategy(value.__code__, strategy)
    return kind
