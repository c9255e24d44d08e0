"""What decides how a machine rounds: the versions of PyTorch and of the system's library, the
device, and the processor with the number of threads.

Two machines with equal texts apply the same updates with equal bits.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def arithmetic(device: torch.device) -> str:
    """How updates are rounded on ``device`` of this machine, in words."""
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{version}, {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return f"{version}, {device.type}, {platform.machine()}"
    # Sums, such as the norms by which gradients are clipped, are split by threads.
    capability = torch.backends.cpu.get_cpu_capability()
    system = " ".join((platform.system(), *platform.libc_ver())).strip()
    threads = torch.get_num_threads()
    return f"{version}, {system}, {_processor()}, {capability}, threads: {threads}"


def _processor() -> str:
    """The name of the processor, or else of its kind."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
