"""The exit report of a worker: it tells its agent that it finished, or that its script raised."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from traceback import print_exception, walk_tb
from types import TracebackType
from typing import Any

from potluck._core.backends.agent_link import AgentLink
from potluck._core.background import why
from potluck._core.wire import worker_link
from potluck.errors import AgentLost, Desync, GroupError, LinkError, RemoteError

GOODBYE_S = 2.0

_POTLUCK = str(Path(__file__).parents[1])

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_SIGNS_OF_A_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo/transport",
    "nccl communicator was aborted",
    "socket timeout",
)
"""Parts of the texts of RuntimeErrors by which other libraries report a lost connection."""


@dataclass(eq=False, repr=False)
class ExitReport:
    """Reports the end of this worker's script to the agent, from an exception hook and at exit.

    ``describe()`` names the worker. ``follows(error)`` says whether an error is the consequence of
    another worker's loss, and ``gives_up(error)`` whether the script could have gone on after that
    loss. ``on_failure(error)`` is called after the report of an error that is no such consequence.
    """

    talk: AgentLink
    _: KW_ONLY
    describe: Callable[[], str]
    follows: Callable[[BaseException], bool]
    gives_up: Callable[[BaseException], bool] = lambda _: False
    on_failure: Callable[[BaseException], None] = lambda _: None

    def __post_init__(self) -> None:
        self.has_failed = False
        """Whether a failure was reported. May be set by the owner; then no report follows."""
        self._previous_hook: Hook = sys.excepthook
        sys.excepthook = self._uncaught

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RemoteError) and self._previous_hook is sys.__excepthook__:
            # The worker that failed shows how; of the others it matters where they were.
            limit = _frames_of_script(traceback)
            print_exception(kind, error, traceback, limit=limit, chain=False)
        else:
            self._previous_hook(kind, error, traceback)
        if not self.talk.owner.is_here:  # the script of a forked child raised
            return
        if isinstance(error, KeyboardInterrupt | AgentLost) or self.has_failed:
            return
        self.has_failed = True
        secondary = self.follows(error)
        text = f"{self.describe()} failed: {why(error)}"
        gave_up = secondary and self.gives_up(error)
        self.talk.say(
            worker_link.Failed(self.talk.worker, worker_link.clip(text), secondary, gave_up)
        )
        self.talk.flush(GOODBYE_S)
        if not secondary:
            self.on_failure(error)

    def end(self, *, is_finished: bool) -> None:
        """Report that this worker has finished, if ``is_finished``, and end the link to the
        agent."""
        if is_finished and not self.has_failed:
            self.talk.finish()
        self.talk.end()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook


def _frames_of_script(traceback: TracebackType | None) -> int:
    """How many calls there are before the first of potluck's own."""
    files = (frame.f_code.co_filename for frame, _ in walk_tb(traceback))
    return sum(1 for _ in itertools.takewhile(lambda file: not file.startswith(_POTLUCK), files))


def is_group_error(error: BaseException) -> bool:
    """Whether a call of potluck failed because of another rank."""
    return isinstance(error, GroupError) and not isinstance(error, Desync)


def may_follow_from_a_loss(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes is about a connection to another rank, of potluck, of
    torch or of a library behind them. Mistakes of the script are not."""
    return any(_is_of_a_connection(each) for each in _chain(error))


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, Desync):
        return False
    if isinstance(error, GroupError | LinkError | ConnectionError):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):  # torch.distributed's
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_A_LOSS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
