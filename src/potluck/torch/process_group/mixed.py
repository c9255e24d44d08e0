"""Check that a group has no backends besides potluck, since torch can't combine them.

In torch a group has either one backend in Python, which serves all devices, or several of torch's
own, one for each device type. For ``"cpu:gloo,cuda:potluck"`` torch makes both and silently drops
all but the backend in Python.
"""

from __future__ import annotations

import sys

from potluck._core.autoload import NAME
from potluck.errors import ConfigurationError

_MAKER = "_new_process_group_helper"
"""The function of torch that makes a group. It tells a backend neither the other backends nor the
device type, so these are read from that function's frame. If a release of torch renames the
function, the tests of this module fail."""


def check_alone(call: str) -> None:
    """ConfigurationError if the group that torch is creating has backends besides potluck.

    ``call`` is the name of the user's call, for the error.
    """
    named = _named_backends()
    others = sorted({backend for backend in named.values() if backend != NAME})
    if not others:
        return
    asked = ",".join(f"{device}:{backend}" for device, backend in named.items())
    raise ConfigurationError(
        f'{call}(backend="{asked}"): potluck can\'t share a group with {" and ".join(others)}. '
        f'Either let potluck serve all devices, with backend="{NAME}" (tensors of accelerators go '
        f'through host memory), or make a group for each: init_process_group("{others[0]}") '
        f'and then group = torch.distributed.new_group(backend="{NAME}")'
    )


def _named_backends() -> dict[str, str]:
    """The backend of each device type, from the caller's ``backend`` argument."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _MAKER:
            return dict(frame.f_locals["backend_config"].get_device_backend_map())
    return {}
