"""The device of a model: which one it is, how it rounds, and when it has computed.

Machines whose ``arithmetic`` is equal apply the same updates with equal bits. What decides how a
machine rounds is PyTorch's version, the system's mathematical library (a schedule of learning
rates calls it, also where the model is on a GPU), the device, and of a processor also the number of
threads, by which sums are split.
"""

from __future__ import annotations

import platform

import torch
from torch import nn

from potluck._core.system import processor_name


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter of ``model``; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has computed what was queued on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def arithmetic(device: torch.device) -> str:
    """How updates are rounded on ``device`` of this machine, in words."""
    system = " ".join((platform.system(), *platform.libc_ver())).strip()
    software = f"torch {torch.__version__}, {system}"
    if device.type == "cuda":
        return f"{software}, {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return f"{software}, {device.type}, {platform.machine()}"
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{software}, {processor_name()}, {capability}, threads: {threads}"
