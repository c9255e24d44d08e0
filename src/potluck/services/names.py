"""Names of services that all workers of a job make together: each once in a context.

The worker that serves would refuse a second one, but the others would find the first, and get its
answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_used: WeakKeyDictionary[DistributedContext, set[str]] = WeakKeyDictionary()


def check_unused(ctx: DistributedContext, kind: str, name: str) -> None:
    """ValueError, on every worker alike, if ``name`` was used before. ``kind`` is the class."""
    if name in _used.get(ctx, ()):
        raise ValueError(
            f"this context has had a {kind} {name!r} already: give the next one another name, as "
            f"{kind}(..., name={name + '-2'!r})"
        )


def note_used(ctx: DistributedContext, name: str) -> None:
    """Call this when the making has succeeded: one that failed is made again by the same name."""
    _used.setdefault(ctx, set()).add(name)
