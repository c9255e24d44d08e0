"""``TrainingArguments`` for the ``Trainer`` of Hugging Face transformers, with potluck's
backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from potluck._core.optional import require
from potluck.torch.plugins import start

_transformers: Any = require("transformers", "ecosystem")


@dataclass
class TrainingArguments(_transformers.TrainingArguments):  # type: ignore[misc]
    """transformers' arguments, with the default ``ddp_backend="potluck"``.

    The Trainer's Accelerate refuses that name on CPUs, so the group is opened here and Accelerate
    gets no name: it uses the open group, or none in a single process.
    """

    ddp_backend: str | None = field(
        default="potluck", metadata={"help": "The backend of the process group."}
    )

    def __post_init__(self) -> None:
        backend = self.ddp_backend
        if backend is not None:
            start(backend, timedelta(seconds=self.ddp_timeout))
            self.ddp_backend = None
        super().__post_init__()
        self.ddp_backend = backend
