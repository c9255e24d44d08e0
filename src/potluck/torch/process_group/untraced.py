"""Keeps torch.compile out of the group's own code.

While a compiled model runs, dynamo looks at every Python frame, also at ours when torch's C++ code
(DDP) calls them. It can't trace threads and sockets, so it is told to look away.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def untraced(kind: _Class) -> _Class:
    """Class decorator: all plain methods, and what they call, run as they are. Costs nothing."""
    dynamo: Any = eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):  # since torch 2.8
        skip = dynamo._FrameAction.SKIP
        for value in vars(kind).values():
            if isinstance(value, types.FunctionType):
                strategy = dynamo._FrameExecStrategy(skip, skip)
                dynamo.set_code_exec_strategy(value.__code__, strategy)
    return kind
