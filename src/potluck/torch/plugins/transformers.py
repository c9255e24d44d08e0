"""Hugging Face transformers: ``TrainingArguments`` from here, for its own ``Trainer``."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from potluck.optional import require
from potluck.torch.plugins.start import start

_transformers: Any = require("transformers", "ecosystem")


@dataclass
class TrainingArguments(_transformers.TrainingArguments):  # type: ignore[misc]
    """transformers' own arguments, with ``ddp_backend`` ``"potluck"``.

    Accelerate, below, refuses that name on CPUs, so the group is opened here and Accelerate is
    given no name: with a group it takes that one, without (a script started alone) it needs none.
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
