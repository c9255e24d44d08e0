"""Running one method, and telling what it raised and where. No I/O."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from potluck.services.definition import Call, Service
from potluck.wire.services import MAX_TEXT, Failure, Request


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call ends with. ``place`` is that of the method."""

    result: Any = None
    failure: Failure | None = None
    place: str = ""


def run(service: Service, call: Call, arguments: Any) -> Answer:
    """Call the method that ``call`` names, with arguments by position (int keys) and by name."""
    method = service.methods[call.method]
    place = _place_of(method)
    try:
        if service.before is not None:
            service.before(call)
        positional = [arguments[key] for key in arguments if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        return Answer(method(call, *positional, **named), place=place)
    except (Exception, SystemExit) as error:
        # Without an own frame of the method, its arguments did not fit.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        raised = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return Answer(failure=failure_of(error, raised or place))


def outcome(future: Future[Any], place: str) -> Answer:
    """What a call ends with whose method, at ``place``, returned ``future``, which has ended."""
    try:
        return Answer(future.result(), place=place)
    except (Exception, CancelledError) as error:
        return Answer(failure=failure_of(error, place), place=place)


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


def _place_of(method: Callable[..., Any]) -> str:
    code = getattr(method, "__code__", None)
    if code is None:
        return ""
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
