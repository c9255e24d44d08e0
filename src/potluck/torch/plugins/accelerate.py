"""Hugging Face Accelerate: ``Accelerator(cpu=True, kwargs_handlers=[process_group()])``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from potluck._core.optional import require
from potluck.torch.plugins import start


def process_group(backend: str = "potluck", timeout: timedelta | None = None) -> Any:
    """Open the process group, and return a handler for Accelerate's ``kwargs_handlers``.

    Use it in place of ``InitProcessGroupKwargs(backend, timeout)``: on CPUs Accelerate refuses
    names other than gloo and mpi, but uses a group that exists. Without a launcher's variables no
    group is opened, and the script runs as a single process. MissingDependency without Accelerate.
    """
    utils = require("accelerate.utils", "ecosystem")
    start(backend, timeout)
    return utils.InitProcessGroupKwargs(timeout=timeout)
