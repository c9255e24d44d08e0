"""Tells torch that the backend ``"potluck"`` exists; torch calls this by itself.

When torch is imported it calls ``register`` through the entry point group ``torch.backends``, so
this module must be cheap: only names are registered, and what is behind them is imported, by name,
when the first process group is made. ``import potluck.torch`` calls it too, for a torch that was
imported without its extensions.
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "potluck"
DEVICES = ("cpu", "cuda", "mps")

_GROUPS = "potluck.torch.process_group"


def register() -> None:
    """Register the backend and ``potluck://``. Idempotent; a torch without distributed is fine."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
    dist.register_rendezvous_handler(NAME, _rendezvous)  # type: ignore[attr-defined, no-untyped-call]


def _create(options: Any, backend_options: Any) -> Any:
    return importlib.import_module(f"{_GROUPS}.creation").create(options, backend_options)


def _rendezvous(url: str, *arguments: Any, **options: Any) -> Any:
    return importlib.import_module(f"{_GROUPS}.storeless").rendezvous(url, *arguments, **options)
