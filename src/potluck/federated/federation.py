"""``Federation``: the server's rounds. What is decided is in the strategy and in ``patience.py``;
here questions go out and answers come in."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from potluck.errors import FederationError
from potluck.federated.clients import Clients, Reply
from potluck.federated.history import History, RoundReport
from potluck.federated.parameters import Parameters, checked, difference
from potluck.federated.patience import Deadlines, Gathering, Patience
from potluck.federated.strategies.averaging import FedAvg
from potluck.federated.strategies.base import Config, Round, Strategy
from potluck.federated.updates import Update, checked_update
from potluck.waiting import to_stderr

Evaluate = Callable[[int, Parameters], Mapping[str, float]]

_LINE_EVERY_S = 1.0


@dataclass(slots=True)
class Gathered:
    """The answers of one question to several clients, in the order in which they were asked."""

    answers: dict[str, Any]
    missing: dict[str, str]
    times: list[float]
    num_late: int


class Federation:
    """A server's access to its clients. [server][potluck.federated.server]'s function gets one."""

    def __init__(
        self, clients: Clients, *, seed: int = 0, say: Callable[[str], None] = to_stderr
    ) -> None:
        """``say`` gets a line for each round, at most one a second, and for each round with missing
        clients."""
        self.seed = seed
        self.histories: list[History] = []
        """Those of all runs so far."""
        self._clients = clients
        self._say = say
        self._said_at = time.monotonic()

    def run(
        self,
        initial: Parameters,
        *,
        rounds: int,
        strategy: Strategy | None = None,
        patience: Patience | None = None,
        evaluate: Evaluate | None = None,
    ) -> History:
        """Train for ``rounds`` rounds from the parameters ``initial``.

        ``strategy`` is FedAvg() by default. ``evaluate(number, parameters)`` returns metrics of the
        global parameters after a round. Every wait has a bound, see
        [Patience][potluck.federated.Patience]. A client that fails, or whose update is refused,
        is missing in its round; the others' updates count. FederationError if a round has too few
        clients and ``patience.too_few`` is ``"stop"``. TypeError or ValueError for arguments that
        do not fit, and for what a strategy returns.
        """
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
            raise ValueError(f"rounds is {rounds!r}; a whole number, 0 or more, is needed")
        strategy = FedAvg() if strategy is None else strategy
        for method in ("configure", "aggregate"):
            if isinstance(strategy, type) or not callable(getattr(strategy, method, None)):
                raise TypeError(
                    f"a strategy is an object with configure(round, clients) and "
                    f"aggregate(round, updates), such as FedAvg(); {strategy!r} has no {method}"
                )
        patience = Patience() if patience is None else patience
        parameters = checked(initial, "initial")
        deadlines = Deadlines(patience)
        seeds = np.random.SeedSequence(self.seed).generate_state(max(rounds, 1), np.uint64)
        reports: list[RoundReport] = []
        for number in range(1, rounds + 1):
            now = Round(number, rounds, parameters, int(seeds[number - 1] >> np.uint64(1)))
            parameters, report = self._round(now, strategy, patience, deadlines)
            if evaluate is not None:
                found = {name: float(v) for name, v in evaluate(number, parameters).items()}
                report = replace(report, evaluation=found)
            reports.append(report)
            self._tell(report, rounds)
            if report.note and patience.too_few == "stop":
                raise FederationError(f"round {number} of {rounds}: {report.note}")
        self.histories.append(History(parameters, tuple(reports)))
        return self.histories[-1]

    # -- one round

    def _round(
        self, now: Round, strategy: Strategy, patience: Patience, deadlines: Deadlines
    ) -> tuple[Parameters, RoundReport]:
        began = time.monotonic()
        there = self._clients.wait(patience.min_clients, patience.start_s)
        if len(there) < patience.min_clients:
            note = (
                f"{len(there)} clients are there, {patience.min_clients} were asked for "
                f"(min_clients), after {patience.start_s:g} s"
            )
            seconds = time.monotonic() - began
            return now.parameters, RoundReport(
                now.number, len(there), (), (), {}, seconds, None, note=note
            )
        asked = self._configured(now, strategy, there)
        deadline_s: float | None = deadlines.next_s()
        if self._clients.is_simulated and patience.deadline == "adaptive":
            deadline_s = None
        least = int(getattr(strategy, "min_updates", 1))
        fewest = patience.fewest(len(asked), least)
        arguments = {
            client: {"parameters": now.parameters, "config": config}
            for client, config in asked.items()
        }
        began = time.monotonic()
        enough = max(patience.enough(len(asked)), min(fewest, len(asked)))
        gathered = self.gather("train", arguments, enough, deadline_s, _as_update(now.parameters))
        if deadline_s is not None:
            deadlines.note(gathered.times, gathered.num_late, deadline_s)
        updates: list[Update] = list(gathered.answers.values())
        parameters, note = now.parameters, ""
        if len(updates) < fewest:
            note = f"{len(updates)} of at least {fewest} updates came; the parameters stay"
        else:
            parameters = self._aggregated(now, strategy, updates)
        return parameters, RoundReport(
            number=now.number,
            num_available=len(there),
            asked=tuple(asked),
            arrived=tuple(gathered.answers),
            missing=gathered.missing,
            seconds=time.monotonic() - began,
            deadline_s=deadline_s,
            metrics=mean_metrics(updates),
            note=note,
        )

    def _configured(
        self, now: Round, strategy: Strategy, there: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """What the strategy asks of whom, with the entries that every client gets."""
        configured: Mapping[str, Config] = strategy.configure(now, there)
        unknown = sorted(set(configured) - set(there))
        if unknown:
            raise ValueError(
                f"{type(strategy).__name__}.configure chose unknown client {unknown[0]!r}"
            )
        order = {client: number for number, client in enumerate(there)}
        return {
            client: {
                **configured[client],
                "round": now.number,
                "seed": _seed_of(now.seed, client),
            }
            for client in sorted(configured, key=order.__getitem__)
        }

    def _aggregated(self, now: Round, strategy: Strategy, updates: Sequence[Update]) -> Parameters:
        what = f"{type(strategy).__name__}.aggregate"
        found = checked(strategy.aggregate(now, updates), f"the result of {what}")
        why = difference(found, now.parameters)
        if why:
            raise ValueError(f"{what}: {why}")
        return found

    def gather(
        self,
        method: str,
        arguments: Mapping[str, Mapping[str, Any]],
        enough: int,
        deadline_s: float | None,
        understand: Callable[[str, Any], Any],
    ) -> Gathered:
        """Call ``method`` of all clients in ``arguments``; wait for ``enough`` of them, at most
        ``deadline_s``. ``understand(client, answer)`` checks an answer."""
        gathering = Gathering(arguments, enough)
        replies: queue.Queue[Reply] = queue.Queue()
        answers: dict[str, Any] = {}
        times: list[float] = []
        began = time.monotonic()
        give_up = self._clients.start(method, arguments, deadline_s, replies.put)
        try:
            while not gathering.is_over:
                left = None if deadline_s is None else began + deadline_s - time.monotonic()
                try:
                    if left is not None and left <= 0:
                        raise queue.Empty
                    reply = replies.get(timeout=left)
                except queue.Empty:
                    break
                answer, reason = reply.answer, reply.reason
                if answer is not None and not reason:
                    reason = str(answer.get("refused", ""))
                if not reason:
                    try:
                        answer = understand(reply.client, answer)
                    except (TypeError, ValueError, KeyError, AttributeError) as error:
                        reason = f"its answer was refused: {error}"
                if gathering.answered(reply.client, reason):
                    answers[reply.client] = answer
                    times.append(time.monotonic() - began)
        finally:
            give_up()
        if gathering.num_arrived >= enough:
            gathering.end("enough others came first")
            num_late = 0
        else:
            num_late = gathering.end(f"no answer within {deadline_s or 0:.1f} s")
        in_order = {client: answers[client] for client in arguments if client in answers}
        return Gathered(in_order, gathering.missing, times, num_late)

    def _tell(self, report: RoundReport, total: int) -> None:
        now = time.monotonic()
        if report.missing or report.note or now - self._said_at >= _LINE_EVERY_S:
            self._said_at = now
            self._say(report.line(total))


def mean_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """The means of the metrics, each over the clients that have it, by numbers of samples."""
    found: dict[str, tuple[float, int]] = {}
    for update in updates:
        for name, value in update.metrics.items():
            total, weight = found.get(name, (0.0, 0))
            found[name] = (total + value * update.num_samples, weight + update.num_samples)
    return {name: total / weight for name, (total, weight) in found.items()}


def _as_update(expected: Parameters) -> Callable[[str, Any], Update]:
    def understand(client: str, answer: Any) -> Update:
        found = Update(answer["parameters"], answer["num_samples"], answer["metrics"])
        return checked_update(found, expected, client)

    return understand


def _seed_of(seed: int, client: str) -> int:
    """A number of its own for each client."""
    words = [seed & 0xFFFFFFFF, seed >> 32, *client.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
