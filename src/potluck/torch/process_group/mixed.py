"""Refuses a group in which each device type has another backend: torch can't build it with potluck.

torch gives a group either to one backend written in Python, which then serves all devices, or to
several of its own, one for each device type. For ``"cpu:gloo,cuda:potluck"`` it makes both and
drops all but the one written in Python, without a word.
"""

from __future__ import annotations

import sys

from potluck.autoload import NAME
from potluck.errors import ConfigurationError

_MAKER = "_new_process_group_helper"
"""The function of torch that makes a group. It tells a backend neither the other backends nor the
device type, so what the caller named is read where it lies, in that function's frame. Should a
release of torch rename it, the tests of this module fail.
"""


def check_alone(call: str) -> None:
    """ConfigurationError if the group that torch is making has backends besides potluck.

    ``call`` is what the user called, as the error names it.
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
    """The backend of each device type, as the caller of torch named them."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _MAKER:
            return dict(frame.f_locals["backend_config"].get_device_backend_map())
    return {}
