"""What a process offers: services, their methods, and what a method learns of its caller."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from potluck._core.printable import MAX_NAME

T = TypeVar("T")

_MARK = "_potluck_service"


class Call(msgspec.Struct, frozen=True):
    """One call of a service, as its method sees it.

    ``node`` is the id of the caller's node, which its certificate has proved, and ``worker`` the
    caller's name in the job (``Member.worker``), empty for a program outside of jobs. ``rank`` is
    that worker's rank in the server's present group, -1 if the group has no such worker.
    ``timeout_s`` is what the caller waits.
    """

    node: str
    worker: str
    rank: int
    service: str
    method: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str
    is_concurrent: bool
    before: Callable[[Call], None] | None


@dataclass(frozen=True, slots=True)
class Service:
    """A named set of methods, each after ``before(call)``. Unless ``is_concurrent``, one call runs
    at a time."""

    name: str
    methods: Mapping[str, Callable[..., Any]]
    is_concurrent: bool
    before: Callable[[Call], None] | None


def service(
    name: str, *, concurrent: bool = False, before: Callable[[Call], None] | None = None
) -> Callable[[T], T]:
    """Name the service of a function or class; ``ctx.serve`` offers it to other workers,
    ``NodeServices.serve`` to programs on other machines.

    A function is one method, called by its own name. A class gives each public method of the
    instance that is served. Each takes a [Call][potluck.Call] first, then the caller's arguments,
    and returns what a payload can hold, or a ``concurrent.futures.Future`` of it: then the reply
    leaves when the Future has ended, and no thread waits meanwhile. Calls of one service run one
    after the other, in the order in which they are complete; with ``concurrent`` they run at the
    same time, on the threads of ``serve``. ``before(call)`` runs ahead of every method, and may
    refuse a caller by an error, which the caller gets as a HandlerError.

    ValueError for a name that is empty, too long or not printable.
    """
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(
            f"the name of a service is 1 to {MAX_NAME} printable characters, not {name!r:.80}; "
            "write @potluck.service('name')"
        )

    def mark(thing: T) -> T:
        setattr(thing, _MARK, _Mark(name, concurrent, before))
        return thing

    return mark


def services_of(*things: Any) -> list[Service]:
    """The services that functions and instances, made with ``service``, are or belong to."""
    methods: dict[str, dict[str, Callable[..., Any]]] = {}
    marks: dict[str, _Mark] = {}
    for thing in things:
        mark = getattr(thing, _MARK, None)
        if mark is None or inspect.isclass(thing):
            made = f"an instance, {thing.__name__}()" if mark else "what @potluck.service(...) made"
            raise TypeError(f"serve takes {made}, not {thing!r}")
        if marks.setdefault(mark.name, mark) != mark:
            raise ValueError(
                f"the parts of service {mark.name!r} differ in 'concurrent' or 'before'"
            )
        found = {thing.__name__: thing} if inspect.isfunction(thing) else _methods_of(thing)
        table = methods.setdefault(mark.name, {})
        for name, method in found.items():
            if not _takes_a_call(method):
                raise TypeError(
                    f"{name} of service {mark.name!r} takes no argument; the first one of every "
                    "method is the Call of its caller"
                )
            if name in table:
                raise ValueError(f"service {mark.name!r} has two methods {name!r}")
            table[name] = method
    return [
        Service(name, methods[name], mark.is_concurrent, mark.before)
        for name, mark in marks.items()
    ]


def _takes_a_call(method: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(method).parameters.values()), None)
    return first is not None and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD)


def _methods_of(instance: Any) -> dict[str, Callable[..., Any]]:
    return {
        name: getattr(instance, name)
        for name, value in inspect.getmembers_static(type(instance))
        if not name.startswith("_") and inspect.isfunction(value)
    }
