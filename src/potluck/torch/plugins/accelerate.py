"""Hugging Face Accelerate: ``Accelerator(cpu=True, kwargs_handlers=[process_group()])``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from potluck.optional import require
from potluck.torch.plugins.start import start


def process_group(backend: str = "potluck", timeout: timedelta | None = None) -> Any:
    """A handler for ``kwargs_handlers``, in place of ``InitProcessGroupKwargs(backend, timeout)``.

    Accelerate refuses other names than gloo and mpi on CPUs, but takes a group that is there: so
    this opens it. Without a launcher's variables nothing is opened, and the script is alone.
    """
    utils = require("accelerate.utils", "ecosystem")
    start(backend, timeout)
    return utils.InitProcessGroupKwargs(timeout=timeout)
