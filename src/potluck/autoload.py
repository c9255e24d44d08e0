"""Tells torch that the backend ``"potluck"`` exists; torch calls this by itself.

When torch is imported it calls ``register`` through the entry point group ``torch.backends``, so
this module must be cheap: only names are registered, and what is behind them is imported, by name,
when the first process group is made. ``import potluck.torch`` calls it too, for a torch that was
imported without its extensions.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
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
    # Private, since torch lets no handler be registered twice; without it waits are silent, and
    # `potluck run` knows nothing of the worlds that its workers form.
    handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})
    for scheme in ("env", "tcp"):
        if scheme in handlers:
            handlers[scheme] = _watched(handlers[scheme])


def _create(options: Any, backend_options: Any) -> Any:
    return importlib.import_module(f"{_GROUPS}.creation").create(options, backend_options)


def _rendezvous(url: str, *arguments: Any, **options: Any) -> Any:
    return importlib.import_module(f"{_GROUPS}.storeless").rendezvous(url, *arguments, **options)


def _watched(handler: Callable[..., Any]) -> Callable[..., Any]:
    """``handler`` of torch's, which says for whom it waits if the group will be potluck's. In a
    worker of ``potluck run`` the ranks meet at their agents first."""

    def watched(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[Any]:
        limit = {} if timeout is None else {"timeout": timeout}
        if os.environ.get("POTLUCK_AGENT"):
            importlib.import_module(f"{_GROUPS}.launched").meet(url, timeout)
        caller = sys._getframe(1)  # init_process_group: a handler is not told the backend
        if timeout is None or NAME not in str(caller.f_locals.get("backend", "")):
            yield from handler(url, **limit, **options)
            return
        coming = importlib.import_module(f"{_GROUPS}.coming")
        yield from coming.come(handler, url, timeout=timeout, **options)

    return watched
