"""Services and their methods: how they are declared, and how a server runs one. No I/O."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from potluck._core.printable import MAX_NAME
from potluck._core.wire.services import MAX_TEXT, Failure, Request

T = TypeVar("T")

_MARK = "_potluck_service"


class Call(msgspec.Struct, frozen=True):
    """One call of a service: its caller, and what it calls.

    ``node`` is the id of the caller's node, which its certificate has proved, and ``worker`` the
    caller's name in the job (``Member.worker``), empty for a program outside of jobs. ``rank`` is
    that worker's rank in the server's present group, -1 if the group has no such worker.
    ``timeout_s`` is the caller's deadline in seconds.
    """

    node: str
    worker: str
    rank: int
    service: str
    method: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """A named set of methods, each after ``before(call)``. Unless ``is_concurrent``, one call runs
    at a time. The mark of a function or class is its service, yet without methods."""

    name: str
    is_concurrent: bool
    before: Callable[[Call], None] | None
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


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
        setattr(thing, _MARK, Service(name, concurrent, before))
        return thing

    return mark


def services_of(*things: Any) -> list[Service]:
    """The services of functions and instances that were made with ``service``."""
    methods: dict[str, dict[str, Callable[..., Any]]] = {}
    marks: dict[str, Service] = {}
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
    return [replace(mark, methods=methods[name]) for name, mark in marks.items()]


def _takes_a_call(method: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(method).parameters.values()), None)
    return first is not None and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD)


def _methods_of(instance: Any) -> dict[str, Callable[..., Any]]:
    return {
        name: getattr(instance, name)
        for name, value in inspect.getmembers_static(type(instance))
        if not name.startswith("_") and inspect.isfunction(value)
    }


class Answer(NamedTuple):
    """The end of a call of ``method``: its result or failure."""

    result: Any = None
    failure: Failure | None = None
    method: Callable[..., Any] | None = None


def run(service: Service, call: Call, arguments: Any) -> Answer:
    """Call the method that ``call`` names, with arguments by position (int keys) and by name."""
    method = service.methods[call.method]
    try:
        if service.before is not None:
            service.before(call)
        positional, named = [], {}
        for key, value in arguments.items():
            if isinstance(key, str):
                named[key] = value
            elif isinstance(key, int):
                positional.append(value)
        return Answer(method(call, *positional, **named), method=method)
    except (Exception, SystemExit) as error:
        # Without an own frame of the method, its arguments did not fit.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        raised = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return Answer(failure=failure_of(error, raised or place_of(method)))


def outcome(future: Future[Any], method: Callable[..., Any] | None) -> Answer:
    """The end of a call whose ``method`` returned ``future``, which has ended."""
    try:
        return Answer(future.result(), method=method)
    except BaseException as error:  # else there would be no reply
        return Answer(failure=failure_of(error, place_of(method)), method=method)


def failure_of(error: BaseException, place: str) -> Failure:
    """``error`` as the caller gets it."""
    return Failure(type(error).__qualname__, str(error)[:MAX_TEXT], place)


def unknown(request: Request, services: Mapping[str, Service]) -> Answer:
    """The answer to a call of an unknown service or method, or to the question for all names."""
    if not request.service:
        return Answer(sorted(services))
    service = services.get(request.service)
    if service is None:
        there = ", ".join(map(repr, sorted(services))) or "none"
        text = f"there is no service {request.service!r:.80}; there are: {there}"
    else:
        there = ", ".join(sorted(service.methods)) or "none"
        text = f"service {service.name!r} has no method {request.method!r:.80}; it has: {there}"
    return Answer(failure=Failure("", text[:MAX_TEXT], is_unknown=True))


def place_of(method: Callable[..., Any] | None) -> str:
    """The file and line of ``method``."""
    code = getattr(method, "__code__", None)
    if code is None:
        return ""
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


_used: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
"""By context: the names of services that all workers of its job made together."""


def check_unused(ctx: object, kind: str, name: str) -> None:
    """ValueError, on every worker alike, if this context made a service ``name`` before. ``kind``
    is the class.

    The worker that serves would refuse a second one of that name, but the others would find the
    first one, and get its answers.
    """
    if name in _used.get(ctx, ()):
        raise ValueError(
            f"this context has had a {kind} {name!r} already: give the next one another name, as "
            f"{kind}(..., name={name + '-2'!r})"
        )


def note_used(ctx: object, name: str) -> None:
    """Note the name of a service that was made. After a failure the name may be used again."""
    _used.setdefault(ctx, set()).add(name)
