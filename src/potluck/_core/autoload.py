"""Registration of the backend ``"potluck"`` with torch, which torch itself calls.

When torch is imported it calls ``register`` through the entry point group ``torch.backends``, so
this module must be cheap: it registers names, and the modules behind them are imported when the
first process group is made. ``import potluck.torch`` calls ``register``, too, in case torch was
imported without its extensions (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
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
    # torch's handlers are wrapped in its private table, since it does not let a handler be
    # registered twice. Without that, waits are silent, and `potluck run` does not see its workers'
    # worlds.
    handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {})
    for scheme in ("env", "tcp"):
        if scheme in handlers:
            handlers[scheme] = _watched(handlers[scheme])
    if os.environ.get("POTLUCK_BROKER"):
        for name in ("TCPStore", "FileStore", "ProcessGroupGloo"):
            if hasattr(dist, name):
                _check_before(getattr(dist, name), name)


def _check_before(kind: type[Any], name: str) -> None:
    """In a sandbox, have ``kind`` refuse at once what it can't do there."""
    make = kind.__init__

    def checked(self: Any, *arguments: Any, **options: Any) -> None:
        importlib.import_module(f"{_GROUPS}.sandboxed").CHECKS[name](*arguments, **options)
        make(self, *arguments, **options)

    kind.__init__ = checked


def _create(options: Any, backend_options: Any) -> Any:
    return importlib.import_module(f"{_GROUPS}.creation").create(options, backend_options)


def _rendezvous(url: str, *arguments: Any, **options: Any) -> Any:
    return importlib.import_module(f"{_GROUPS}.storeless").rendezvous(url, *arguments, **options)


def _watched(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rendezvous ``handler`` of torch. If the group will be potluck's, the wrapper names the
    missing ranks while it waits. In a worker of ``potluck run`` the ranks first meet at their
    agents."""

    def watched(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[Any]:
        limit = {} if timeout is None else {"timeout": timeout}
        caller = sys._getframe(1)  # init_process_group: a handler is not told the backend
        is_ours = NAME in str(caller.f_locals.get("backend", ""))
        if os.environ.get("POTLUCK_AGENT"):
            launched = importlib.import_module(f"{_GROUPS}.rendezvous")
            if is_ours and launched.is_our(url):
                yield from _rendezvous(url, **limit, **options)
                return
            launched.meet(url, timeout)
        if timeout is None or not is_ours:
            yield from handler(url, **limit, **options)
            return
        waits = importlib.import_module(f"{_GROUPS}.rendezvous")
        yield from waits.watch(handler, url, timeout=timeout, **options)

    return watched
