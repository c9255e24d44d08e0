"""Running one method, and telling what it raised and where. No I/O."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from potluck._core.wire.services import MAX_TEXT, Failure, Request
from potluck.services.definition import Call, Service


class Answer(NamedTuple):
    """What a call ends with. ``method`` is the one that was called."""

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
    """What a call ends with whose ``method`` returned ``future``, which has ended."""
    try:
        return Answer(future.result(), method=method)
    except BaseException as error:  # else nobody would reply
        return Answer(failure=failure_of(error, place_of(method)), method=method)


def failure_of(error: BaseException, place: str) -> Failure:
    """What the caller is told of ``error``."""
    return Failure(type(error).__qualname__, str(error)[:MAX_TEXT], place)


def unknown(request: Request, services: Mapping[str, Service]) -> Answer:
    """The answer to a call of what is not offered, or to the question for all names."""
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
