"""``Federation``: the server's rounds. The aggregation and ``patience.py`` decide; here questions
go out to the ``Clients``, and answers come in. ``Kept`` stores the reports of a run's rounds with
the parameters on disk, so that a killed server can resume.
"""

from __future__ import annotations

import math
import queue
import secrets
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from potluck._core import hints
from potluck._core.waiting import to_stderr
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError, FederationError
from potluck.federated.aggregation import Aggregation, Config, FedAvg, Round
from potluck.federated.parameters import (
    MAX_SAMPLES,
    NotFinite,
    Parameters,
    Update,
    checked,
    checked_update,
    difference,
    fitted,
    flat,
    num_values,
    unflat,
)
from potluck.federated.participant import Answer
from potluck.federated.patience import Deadlines, Gathering, Patience, exchange_s
from potluck.federated.privacy import DifferentialPrivacy, PrivacyLoss, PrivateMean, clipped_sum
from potluck.federated.secure.client import MIN_THRESHOLD
from potluck.federated.secure.rounds import Phase, secure_sum
from potluck.federated.secure.server import Spoiled, TooFew
from potluck.federated.secure.settings import Range, SecureAggregation


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round: how many clients were there (``num_available``) and were ``asked``, which of them
    ``arrived``, and why the others are ``missing``; its ``seconds`` and its deadline (None: none).

    ``metrics`` are the means over the clients, weighted by numbers of samples; ``evaluation`` is
    what the server's ``evaluate`` returned. ``note`` says why the round did not count, if it did
    not. ``epsilon`` is the privacy loss until here; ``saturation`` the fraction of values that
    secure aggregation cut off, and ``num_heavy`` of how many clients it cut off the number of
    samples. All are None without.
    """

    number: int
    num_available: int
    asked: tuple[str, ...]
    arrived: tuple[str, ...]
    missing: Mapping[str, str]
    seconds: float
    deadline_s: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    epsilon: float | None = None
    saturation: float | None = None
    num_heavy: int | None = None

    def line(self, total: int, called: Callable[[str], str] = str) -> str:
        """The round in one line; ``called(client)`` is a client's name for people."""
        came = f"{len(self.arrived)} of {len(self.asked)} clients"
        words = [f"round {self.number} of {total}: {came} in {self.seconds:.1f} s"]
        figures = {**self.metrics, **self.evaluation}
        words += [f"{name} {value:.4g}" for name, value in figures.items()]
        if self.epsilon is not None:
            words.append(f"epsilon {self.epsilon:.3g}")
        if self.saturation:
            words.append(f"{self.saturation:.2%} of the values cut off")
        if self.num_heavy:
            words.append(
                f"{self.num_heavy} clients count with fewer samples than they have (max_samples of "
                "SecureAggregation)"
            )
        for client, why in list(self.missing.items())[:3]:
            words.append(f"without client {called(client)}: {why}")
        if len(self.missing) > 3:
            words.append(f"and without {len(self.missing) - 3} more")
        if self.note:
            words.append(self.note)
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class History:
    """The result of a run: the last global ``parameters``, and a report on each round."""

    parameters: Parameters
    rounds: tuple[RoundReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The reports, ready for JSON, which has no NaN: such figures are None. Without the
        parameters."""
        return {"rounds": [as_plain(each) for each in self.rounds]}


def as_plain(report: RoundReport) -> dict[str, Any]:
    """``report`` as JSON can hold it: figures that are no finite numbers are None."""
    found = asdict(report)
    for kind in ("metrics", "evaluation"):
        found[kind] = {k: v if math.isfinite(v) else None for k, v in found[kind].items()}
    return found


@dataclass(eq=False, repr=False)
class Kept:
    """The rounds of one run in the directory ``directory``: parameters, reports, and the state of
    the aggregation, deadlines, limits and privacy loss. An aggregation with a state of its own has
    ``state_dict()`` and ``load_state_dict(state)``, of arrays, numbers and text."""

    directory: Path | str
    aggregation: Aggregation
    deadlines: Deadlines
    limits: Range | None
    loss: PrivacyLoss

    def __post_init__(self) -> None:
        self._store = CheckpointStore(self.directory, keep=2)

    def save(self, parameters: Parameters, reports: Sequence[RoundReport]) -> None:
        """After a round. CheckpointError if it can't be written."""
        state = {
            "aggregation": type(self.aggregation).__name__,
            "parameters": parameters,
            "reports": [as_plain(each) for each in reports],
            "own": getattr(self.aggregation, "state_dict", dict)(),
            "seconds": list(self.deadlines.seconds),
            "limits": None if self.limits is None else self.limits.state_dict(),
            "loss": self.loss.state_dict(),
        }
        self._store.save(state, len(reports))

    def load(self, initial: Parameters) -> tuple[Parameters, list[RoundReport]]:
        """The parameters and reports after the newest round that is kept; ``initial`` and none if
        there is none. CheckpointError if it is of another model or aggregation."""
        found = self._store.load_latest()
        if found is None:
            return initial, []
        try:
            return self._restored(found.state, initial)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.path} is not of this federation ({error}): pass another directory as "
                "checkpoint=, or remove it"
            ) from error

    def _restored(self, state: Any, initial: Parameters) -> tuple[Parameters, list[RoundReport]]:
        name = type(self.aggregation).__name__
        if state["aggregation"] != name:
            raise ValueError(f"its aggregation is {state['aggregation']}, not {name}")
        parameters = checked(state["parameters"], "its parameters")
        why = difference(parameters, initial)
        if why:
            raise ValueError(f"its parameters do not fit the initial ones: {why}")
        reports = [_report(each) for each in state["reports"]]
        if hasattr(self.aggregation, "load_state_dict"):
            self.aggregation.load_state_dict(state["own"])
        self.deadlines.seconds.extend(map(float, state["seconds"]))
        if self.limits is not None and state["limits"] is not None:
            self.limits.load_state_dict(state["limits"])
        self.loss.load_state_dict(state["loss"])
        return fitted(parameters, initial), reports


def _report(plain: dict[str, Any]) -> RoundReport:
    found = dict(plain)
    for kind in ("metrics", "evaluation"):
        found[kind] = {k: math.nan if v is None else v for k, v in found[kind].items()}
    for kind in ("asked", "arrived"):
        found[kind] = tuple(found[kind])
    return RoundReport(**found)


Evaluate = Callable[[int, Parameters], Mapping[str, float]]

_LINE_EVERY_S = 1.0
_MAX_REASON = 1000


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of one call: the ``answer`` of the ``client``, or the ``reason`` of its failure."""

    client: str
    answer: Answer | None
    reason: str = ""


class Clients(Protocol):
    """All clients of a federation. ``is_simulated``: they run in this process. A subclass may leave
    out ``called`` and ``none_fit``."""

    is_simulated: bool

    def wait(self, num: int, timeout_s: float) -> Sequence[str]:
        """The names of the live clients, once there are ``num``, or after ``timeout_s``."""

    def called(self, client: str) -> str:
        """A client's name in messages, with its machine if that is known."""
        return client

    def none_fit(self) -> str:
        """Why no client can take part; empty if some client can, or has not registered yet."""
        return ""

    def start(
        self,
        method: str,
        arguments: Mapping[str, Mapping[str, Any]],
        timeout_s: float | None,
        put: Callable[[Reply], None],
    ) -> Callable[[], None]:
        """Call ``method`` of each client in ``arguments``; ``put`` gets, from any thread, one reply
        for each call that ends within ``timeout_s``. The returned function gives up: waiting calls
        are not begun, and further replies are dropped."""


@dataclass(slots=True)
class _Plan:
    """The arguments of one run, and its state over the rounds."""

    aggregation: Aggregation
    patience: Patience
    deadlines: Deadlines
    secure: SecureAggregation | None
    range: Range | None
    private: PrivateMean | None
    spoilers: dict[str, str] = field(default_factory=dict)
    """Clients that are left out from now on, and why."""

    def leave_out(self, clients: Mapping[str, str], number: int) -> None:
        """Exclude ``clients`` from the rounds after ``number``; by name, what each did in it."""
        for name, did in clients.items():
            self.spoilers[name] = f"left out: in round {number} it {did}"

    def fewest(self, num_asked: int) -> int:
        """The least number of updates that makes a model."""
        return self.patience.fewest(num_asked, int(getattr(self.aggregation, "min_updates", 1)))


@dataclass(slots=True)
class _Made:
    """The result of a round's clients: ``updates`` for the aggregation, or a ``note`` why the round
    does not count."""

    arrived: tuple[str, ...]
    missing: dict[str, str]
    updates: list[Update] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""
    saturation: float | None = None
    num_heavy: int | None = None


class Federation:
    """A server's access to its clients. [server][potluck.federated.server]'s function gets one."""

    def __init__(
        self, clients: Clients, *, seed: int = 0, say: Callable[[str], None] = to_stderr
    ) -> None:
        """``say`` gets a line for each round: at most one a second, but always for rounds with
        missing clients, and for the last round."""
        self.seed = seed
        self.histories: list[History] = []
        """The histories of all runs so far."""
        self._clients = clients
        self._print = say
        self._printed_at = time.monotonic()
        self._loss = PrivacyLoss()
        self._has_asked = False

    @hints.arguments({}, same=hints.FEDERATION_SAME)
    def run(
        self,
        initial: Parameters,
        *,
        rounds: int,
        aggregation: Aggregation | None = None,
        patience: Patience | None = None,
        evaluate: Evaluate | None = None,
        secure: SecureAggregation | None = None,
        privacy: DifferentialPrivacy | None = None,
        checkpoint: Path | str | None = None,
    ) -> History:
        """Train for ``rounds`` rounds from the parameters ``initial``.

        ``aggregation`` is FedAvg() by default. ``evaluate(number, parameters)`` returns metrics of
        the global parameters after a round. ``secure`` hides single updates from the server,
        ``privacy`` bounds what the parameters tell of a client. With ``checkpoint``, a directory of
        this machine, a server that was killed goes on after its last whole round; an aggregation of
        another kind that learns from rounds needs ``state_dict`` and ``load_state_dict``.

        Every wait has a bound, see [Patience][potluck.federated.Patience]. A client that fails, or
        whose update is refused, is missing in its round; the others' updates count. FederationError
        if a round has too few clients and ``patience.too_few`` is ``"stop"``, or if after
        ``patience.start_s`` all clients have reported that they can't take part; CheckpointError
        for the checkpoint of another federation, or a disk that is full. TypeError or ValueError
        for arguments that do not fit, and for what an aggregation returns.
        """
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
            raise ValueError(f"rounds is {rounds!r}; a whole number, 0 or more, is needed")
        aggregation = FedAvg() if aggregation is None else aggregation
        for method in ("configure", "aggregate"):
            if isinstance(aggregation, type) or not callable(getattr(aggregation, method, None)):
                raise TypeError(
                    "an aggregation is an object with configure(round, clients) and "
                    f"aggregate(round, updates), such as FedAvg(); {aggregation!r} has no {method}"
                )
        patience = Patience() if patience is None else patience
        for given, kind in (
            (patience, Patience),
            (secure, SecureAggregation),
            (privacy, DifferentialPrivacy),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(
                    f"{kind.__name__}(...) of potluck.federated is needed, not {given!r}"
                )
        if (secure or privacy) and not getattr(aggregation, "takes_mean", False):
            raise ValueError(
                f"{type(aggregation).__name__} needs each single update, which secure aggregation "
                "and differential privacy do not give: take FedAvg, FedProx, FedAdam or FedYogi"
            )
        if privacy and patience.min_updates is not None:
            raise ValueError(
                "with privacy= every round is released, however few updates came: leave "
                "Patience's min_updates out"
            )
        if privacy and not (isinstance(patience.wait_for, float) and patience.wait_for == 1):
            raise ValueError(
                f"with privacy= a round waits for all that it asked: leave Patience's wait_for="
                f"{patience.wait_for!r} out. A client that answers early would push another one "
                "out, so the sum could move by 2 * clip, and epsilon is for clip"
            )
        parameters = checked(initial, "initial")
        # With privacy no client's time may decide whether another one's change is in a later sum.
        deadlines = Deadlines(patience, is_fixed=privacy is not None)
        private = None
        if privacy is not None:
            fewest = MIN_THRESHOLD if secure else 1
            private = PrivateMean(privacy, aggregation, self._loss, fewest=fewest)
        plan = _Plan(
            aggregation,
            patience,
            deadlines,
            secure,
            None if secure is None else Range(secure.limit, secure.max_samples),
            private,
        )
        entropy = self.seed
        if privacy is not None and privacy.seed is None:
            entropy = secrets.randbits(128)  # the bound holds for choices that nobody can repeat
        seeds = np.random.SeedSequence(entropy).generate_state(max(rounds, 1), np.uint64)
        kept, reports = None, list[RoundReport]()
        if checkpoint is not None:
            kept = Kept(checkpoint, aggregation, deadlines, plan.range, self._loss)
            parameters, reports = kept.load(parameters)
            if reports:
                self._print(f"going on after round {len(reports)} of {rounds}, from {checkpoint}")
        for number in range(len(reports) + 1, rounds + 1):
            now = Round(number, rounds, parameters, int(seeds[number - 1] >> np.uint64(1)))
            parameters, report = self._round(now, plan)
            if kept is not None and privacy is not None:  # before ``evaluate`` sees the parameters
                kept.save(parameters, [*reports, report])
            if evaluate is not None:
                found = {name: float(v) for name, v in evaluate(number, parameters).items()}
                report = replace(report, evaluation=found)
            reports.append(report)
            if kept is not None:
                kept.save(parameters, reports)
            self._tell(report, rounds)
            if report.note and patience.too_few == "stop":
                raise FederationError(f"round {number} of {rounds}: {report.note}")
        self.histories.append(History(parameters, tuple(reports)))
        return self.histories[-1]

    # -- one round

    def _round(self, now: Round, plan: _Plan) -> tuple[Parameters, RoundReport]:
        patience, began = plan.patience, time.monotonic()
        there = self._there(patience, plan.spoilers)
        if not there and not self._has_asked and (why := self._clients.none_fit()):
            raise FederationError(f"no client can take part: {why}")
        if len(there) < patience.min_clients:
            waited = "" if self._clients.is_simulated else f", after {patience.start_s:g} s"
            note = (
                f"{len(there)} clients are there, {patience.min_clients} were asked for "
                f"(min_clients){waited}"
            )
            seconds = time.monotonic() - began
            return now.parameters, RoundReport(
                now.number, len(there), (), (), plan.spoilers, seconds, None, note=note
            )
        if plan.private is not None:
            plan.private.check(len(there), now.total - now.number + 1)
        left_out = dict(plan.spoilers)  # spoilers of this round are left out of later ones
        asked = self._configured(now, plan.aggregation, there)
        self._has_asked = True
        deadline_s: float | None = plan.deadlines.next_s()
        if self._clients.is_simulated and patience.deadline == "adaptive":
            deadline_s = None
        began = time.monotonic()
        make = self._plain_updates if plan.secure is None else self._secure_updates
        made = make(now, plan, asked, deadline_s, len(there))
        parameters = now.parameters
        if made.updates:
            try:
                parameters = self._aggregated(now, plan.aggregation, made.updates)
            except NotFinite as error:
                made.note = f"{error}; the parameters stay"
        return parameters, RoundReport(
            number=now.number,
            num_available=len(there),
            asked=tuple(asked),
            arrived=made.arrived,
            missing=made.missing | left_out,
            seconds=time.monotonic() - began,
            deadline_s=deadline_s,
            metrics=made.metrics,
            note=made.note,
            epsilon=None if plan.private is None else plan.private.epsilon,
            saturation=made.saturation,
            num_heavy=made.num_heavy,
        )

    def _there(self, patience: Patience, spoilers: Container[str]) -> list[str]:
        """The live clients without the ``spoilers``, once they are ``min_clients``."""
        num_useless = 0
        while True:
            there = self._clients.wait(patience.min_clients + num_useless, patience.start_s)
            fit = [client for client in there if client not in spoilers]
            if len(fit) >= patience.min_clients or len(there) - len(fit) <= num_useless:
                return fit
            num_useless = len(there) - len(fit)

    def _plain_updates(
        self,
        now: Round,
        plan: _Plan,
        asked: dict[str, dict[str, Any]],
        deadline_s: float | None,
        num_available: int,
    ) -> _Made:
        """Every client sends its update. With privacy they become one, with noise."""
        fewest = plan.fewest(len(asked))
        arguments = {
            client: {"parameters": now.parameters, "config": config}
            for client, config in asked.items()
        }
        enough = max(plan.patience.enough(len(asked)), min(fewest, len(asked)))
        most = int(getattr(plan.aggregation, "max_samples", MAX_SAMPLES))
        understand = _as_update(now.parameters, most)
        gathered = self.gather("train", arguments, enough, deadline_s, understand)
        if deadline_s is not None:
            plan.deadlines.note(gathered.times, gathered.num_late, deadline_s)
        updates: list[Update] = list(gathered.answers.values())
        made = _Made(tuple(gathered.answers), gathered.missing, metrics=mean_metrics(updates))
        if plan.private is not None:
            before = flat(now.parameters)
            changes = (flat(each.parameters) - before for each in updates)
            total = clipped_sum(changes, plan.private.clip, len(before))
            made.updates = [_moved(now, plan.private.mean(total, num_available))]
        elif len(updates) < fewest:
            made.note = _too_few(len(updates), fewest)
        else:
            made.updates = updates
        return made

    def _secure_updates(
        self,
        now: Round,
        plan: _Plan,
        asked: dict[str, dict[str, Any]],
        deadline_s: float | None,
        num_available: int,
    ) -> _Made:
        """The clients' changes are summed under masks; the sum becomes one update."""
        assert plan.secure is not None
        assert plan.range is not None
        clip = None if plan.private is None else plan.private.clip
        if clip is not None:
            plan.range.limit, plan.range.max_samples = clip, 1
        missing: dict[str, str] = {}
        began = time.monotonic()

        def ask(
            phase: Phase,
            method: str,
            arguments: dict[str, dict[str, Any]],
            understand: Callable[[str, Any], Any],
            enough: int | None = None,
        ) -> dict[str, Any]:
            if enough is None:
                enough = min(plan.patience.enough(len(asked)), len(arguments))
            left_s = deadline_s
            if deadline_s is not None:
                left_s = exchange_s(phase, deadline_s, time.monotonic() - began)
            gathered = self.gather(method, arguments, enough, left_s, understand)
            if phase == "training" and deadline_s is not None:
                plan.deadlines.note(gathered.times, gathered.num_late, deadline_s)
            if phase != "after":  # a client lost after the training has its change in the sum
                missing.update(gathered.missing)
            return gathered.answers

        try:
            summed = secure_sum(now, asked, plan.secure, plan.range, ask, clip)
        except (FederationError, ValueError) as error:
            if isinstance(error, Spoiled):
                plan.leave_out(error.clients, now.number)
            if plan.private is None:
                return _Made((), missing, note=f"{error}; the parameters stay")
            if isinstance(error, TooFew):
                self._note_hanging(now, plan, len(asked), error.began, error.num)
            noise = plan.private.mean(np.zeros(num_values(now.parameters)), num_available)
            return _Made((), missing, [_moved(now, noise)])
        plan.leave_out(summed.cheats, now.number)
        made = _Made(
            summed.arrived, missing, saturation=summed.saturation, num_heavy=summed.num_heavy
        )
        num_arrived, fewest = len(summed.arrived), plan.fewest(len(asked))
        if plan.private is not None:
            self._note_hanging(now, plan, len(asked), summed.began, num_arrived)
            change = plan.private.mean(summed.change * num_arrived, num_available)
            made.updates = [_moved(now, change)]
        elif num_arrived < fewest:
            made.note = _too_few(num_arrived, fewest)
        else:
            made.updates = [_moved(now, summed.change, max(1, round(summed.num_samples)))]
        return made

    def _note_hanging(
        self, now: Round, plan: _Plan, num_asked: int, began: int, stayed: int
    ) -> None:
        """Count a private round in which one client, by dropping out or staying, decided whether
        there is a sum. (The chance that too few are asked is counted beforehand.)"""
        assert plan.secure is not None
        assert plan.private is not None
        if stayed < num_asked and plan.secure.hangs_on_one(began, stayed):
            plan.private.hung_on_one()
            self._print(
                f"round {now.number}: {stayed} of {num_asked} clients stayed, so that one more or "
                "fewer decides whether there is a sum: epsilon is infinite from now on"
            )

    def _configured(
        self, now: Round, aggregation: Aggregation, there: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """The clients that the aggregation chose, each with its config and the entries for all."""
        configured: Mapping[str, Config] = aggregation.configure(now, there)
        configs = configured.values() if isinstance(configured, Mapping) else [configured]
        if not all(isinstance(config, Mapping) for config in configs):
            raise TypeError(
                f"{type(aggregation).__name__}.configure must return a dict: the clients to ask, "
                f"each with its config, a dict; not {configured!r:.200}"
            )
        unknown = sorted(set(configured) - set(there))
        if unknown:
            raise ValueError(
                f"{type(aggregation).__name__}.configure chose unknown client {unknown[0]!r}"
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

    def _aggregated(
        self, now: Round, aggregation: Aggregation, updates: Sequence[Update]
    ) -> Parameters:
        """The result of ``aggregation`` for ``updates``, checked. NotFinite may be a client's
        fault; TypeError and ValueError, for another structure, are the aggregation's."""
        what = f"{type(aggregation).__name__}.aggregate"
        found = checked(aggregation.aggregate(now, updates), f"the result of {what}")
        why = difference(found, now.parameters)
        if why:
            raise ValueError(f"{what}: {why}")
        return checked(fitted(found, now.parameters), f"the result of {what}")

    def gather(
        self,
        method: str,
        arguments: Mapping[str, Mapping[str, Any]],
        enough: int,
        deadline_s: float | None,
        understand: Callable[[str, Any], Any],
    ) -> Gathering:
        """Call ``method`` of all clients in ``arguments``; wait for ``enough`` of them, at most
        ``deadline_s``. ``understand(client, answer)`` checks an answer."""
        gathering = Gathering(arguments, enough)
        replies: queue.Queue[Reply] = queue.Queue()
        began = time.monotonic()
        give_up = self._clients.start(method, arguments, deadline_s, replies.put)
        try:
            while not gathering.is_over:
                left = None if deadline_s is None else began + deadline_s - time.monotonic()
                try:
                    # Also after the deadline: replies that arrived in time count.
                    reply = replies.get(timeout=None if left is None else max(0.0, left))
                except queue.Empty:
                    break
                answer, reason = reply.answer, reply.reason
                if answer is not None and not reason:
                    reason = str(answer.get("refused", ""))[:_MAX_REASON]
                if not reason:
                    try:
                        answer = understand(reply.client, answer)
                    except (TypeError, ValueError, KeyError, AttributeError) as error:
                        reason = f"its answer was refused: {error}"
                gathering.answered(reply.client, answer, time.monotonic() - began, reason)
        finally:
            give_up()
        gathering.end(deadline_s or 0)
        return gathering

    def _tell(self, report: RoundReport, total: int) -> None:
        now = time.monotonic()
        is_last = report.number == total
        is_news = bool(report.missing or report.note or report.num_heavy)
        if is_last or is_news or now - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = now
            self._print(report.line(total, self._clients.called))


def mean_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """The means of the metrics, weighted by numbers of samples, each over the clients with a finite
    value."""
    found: dict[str, tuple[float, int]] = {}
    for update in updates:
        for name, value in update.metrics.items():
            if not math.isfinite(value):
                continue  # one client's NaN is not the mean of all
            total, weight = found.get(name, (0.0, 0))
            found[name] = (total + value * update.num_samples, weight + update.num_samples)
    return {name: total / weight for name, (total, weight) in found.items()}


def _too_few(num: int, fewest: int) -> str:
    return f"{num} of at least {fewest} updates came; the parameters stay"


def _moved(now: Round, change: Any, num_samples: int = 1) -> Update:
    """The global parameters, moved by ``change``, as one update."""
    return Update(unflat(flat(now.parameters) + change, now.parameters), num_samples)


def _as_update(expected: Parameters, max_samples: int) -> Callable[[str, Any], Update]:
    def understand(client: str, answer: Any) -> Update:
        found = Update(answer["parameters"], answer["num_samples"], answer["metrics"])
        return checked_update(found, expected, client, max_samples)

    return understand


def _seed_of(seed: int, client: str) -> int:
    """A seed for each client."""
    words = [seed & 0xFFFFFFFF, seed >> 32, *client.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
