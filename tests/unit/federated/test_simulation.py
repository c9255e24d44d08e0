"""Whole federations in one process: the functions a user writes, and what goes wrong in them."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import federated
from potluck.errors import ConfigurationError, FederationError
from potluck.federated import FedAvg, Federation, History, Krum, Patience, Update, site
from potluck.federated.federation import Reply
from potluck.federated.participant import Participant
from potluck.federated.simulation import SimulatedClients


def counting(parameters: Any, config: Mapping[str, Any]) -> Update:
    """Adds 1 + the client's number to every parameter."""
    return Update([each + 1 + site().index for each in parameters], 1, {"seed": config["seed"]})


def lead(**options: Any) -> Callable[[Federation], History]:
    def main(federation: Federation) -> History:
        return federation.run([np.zeros(3)], **{"rounds": 2, **options})

    return main


def unhurt(*, fault: Callable[[Any], Update], **options: Any) -> History:
    """Client 1 of 4 has a fault in all rounds."""

    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        return fault(parameters) if site().index == 1 else counting(parameters, config)

    history = federated.simulate(lead(**options), train, num_clients=4)
    for report in history.rounds:
        assert report.arrived == ("0", "2", "3")
        assert list(report.missing) == ["1"]
    np.testing.assert_allclose(history.parameters[0], 2 * (1 + 3 + 4) / 3)
    return history


def test_the_mean_of_all_clients_is_the_next_model() -> None:
    history = federated.simulate(lead(), counting, num_clients=4)
    np.testing.assert_array_equal(history.parameters[0], [5.0] * 3)
    assert [report.arrived for report in history.rounds] == [("0", "1", "2", "3")] * 2
    assert history.rounds[0].deadline_s is None


def test_the_same_seed_gives_the_same_result_on_any_number_of_threads() -> None:
    def noisy(parameters: Any, config: Mapping[str, Any]) -> Update:
        noise = np.random.default_rng(config["seed"]).normal(size=3)
        return Update([each + noise for each in parameters], 1 + site().index)

    def made(num_threads: int, seed: int) -> Any:
        options = {"num_clients": 20, "num_threads": num_threads, "seed": seed}
        return federated.simulate(lead(aggregation=FedAvg(0.5)), noisy, **options).parameters[0]

    np.testing.assert_array_equal(made(1, 3), made(7, 3))
    assert (made(1, 3) != made(1, 4)).all()


def test_a_thousand_clients_take_no_more_threads_than_the_pool() -> None:
    seen: set[str] = set()

    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        seen.add(threading.current_thread().name)
        return counting(parameters, config)

    history = federated.simulate(lead(rounds=1), train, num_clients=1000, num_threads=3)
    assert len(history.rounds[0].arrived) == 1000
    assert len(seen) <= 3
    np.testing.assert_allclose(history.parameters[0], 1 + 999 / 2)


class Slow(Participant):
    """A client that is ``at`` its first call until it is ``released``."""

    def __init__(self) -> None:
        self.at, self.released = threading.Event(), threading.Event()
        self.methods: list[str] = []

    def answer(self, method: str, arguments: Mapping[str, Any]) -> Any:
        self.methods.append(method)
        self.at.set()
        assert self.released.wait(30)
        return {"method": method}


def test_a_client_is_called_when_its_earlier_call_is_over_and_holds_up_no_other_client() -> None:
    """Two threads: the one that is free takes the second call of the slow client first."""
    slow, quick = Slow(), Slow()
    quick.released.set()
    clients = SimulatedClients({"0": slow, "1": quick}, num_threads=2)
    replies: queue.Queue[Reply] = queue.Queue()
    clients.start("first", {"0": {}}, None, replies.put)
    assert slow.at.wait(30)
    clients.start("second", {"0": {}, "1": {}}, None, replies.put)
    assert replies.get(timeout=30) == Reply("1", {"method": "second"})
    assert slow.methods == ["first"]
    slow.released.set()
    found = [replies.get(timeout=30).answer for _ in range(2)]
    assert found == [{"method": "first"}, {"method": "second"}]
    clients.close()


def test_a_function_may_change_what_it_is_given() -> None:
    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        for each in parameters:
            each += 1
        return Update(parameters, 1)

    history = federated.simulate(lead(), train, num_clients=3, num_threads=1)
    np.testing.assert_array_equal(history.parameters[0], [2.0] * 3)


def test_metrics_are_means_by_samples_and_the_server_evaluates() -> None:
    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        return Update(parameters, 1 + 2 * site().index, {"loss": float(site().index)})

    def evaluate(number: int, parameters: Any) -> Mapping[str, float]:
        return {"accuracy": number / 10}

    history = federated.simulate(lead(evaluate=evaluate), train, num_clients=2)
    assert history.rounds[1].metrics == {"loss": 0.75}
    assert [report.evaluation for report in history.rounds] == [
        {"accuracy": 0.1},
        {"accuracy": 0.2},
    ]


def test_one_clients_nan_in_a_metric_is_not_the_mean_of_all_and_json_has_no_nan() -> None:
    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        is_first = site().index == 0
        return Update(parameters, 1, {"loss": math.nan if is_first else 2.0, "auc": math.inf})

    def evaluate(number: int, parameters: Any) -> Mapping[str, float]:
        return {"accuracy": math.nan}

    history = federated.simulate(lead(evaluate=evaluate), train, num_clients=3)
    assert history.rounds[0].metrics == {"loss": 2.0}
    found = json.loads(json.dumps(history.as_dict(), allow_nan=False))
    assert found["rounds"][0]["evaluation"] == {"accuracy": None}


def test_an_aggregate_that_is_infinite_ends_its_round_and_not_the_run() -> None:
    class Careless(FedAvg):
        def aggregate(self, round: federated.Round, updates: Any) -> Any:
            found = super().aggregate(round, updates)
            return [each / (0.0 if round.number == 1 else 1.0) for each in found]

    with np.errstate(divide="ignore"):
        history = federated.simulate(lead(aggregation=Careless()), counting, num_clients=4)
    assert "Careless.aggregate[0] has 3 of 3 values that are NaN or" in history.rounds[0].note
    assert history.rounds[0].note.endswith("the parameters stay")
    assert history.rounds[1].note == ""
    np.testing.assert_array_equal(history.parameters[0], [2.5] * 3)


def test_flowers_word_for_the_aggregation_is_taken() -> None:
    same = federated.simulate(lead(strategy=FedAvg(0.5)), counting, num_clients=4, seed=3)
    mine = federated.simulate(lead(aggregation=FedAvg(0.5)), counting, num_clients=4, seed=3)
    np.testing.assert_array_equal(same.parameters[0], mine.parameters[0])
    assert [each.asked for each in same.rounds] == [each.asked for each in mine.rounds]


def test_an_aggregation_of_ones_own_has_two_methods_and_no_base_class() -> None:
    class First:
        def configure(self, round: federated.Round, clients: Any) -> Mapping[str, Any]:
            return {clients[round.number % len(clients)]: {"epochs": 3}}

        def aggregate(self, round: federated.Round, updates: Any) -> Any:
            return updates[0].parameters

    patience = Patience(min_updates=1)
    history = federated.simulate(
        lead(aggregation=First(), patience=patience), counting, num_clients=3
    )
    assert [report.arrived for report in history.rounds] == [("1",), ("2",)]
    np.testing.assert_array_equal(history.parameters[0], [2.0 + 3.0] * 3)


# What goes wrong at a client: it is named, and the others' updates count.


def test_a_client_without_samples_is_refused() -> None:
    history = unhurt(fault=lambda parameters: Update(parameters, 0))
    assert (
        "num_samples is 0: a client without samples has no update"
        in (history.rounds[0].missing["1"])
    )


@pytest.mark.parametrize("num_samples", ["Smith, John", 2.5, None, True])
def test_a_number_of_samples_of_another_type_is_refused_and_not_quoted(num_samples: Any) -> None:
    history = unhurt(fault=lambda parameters: Update(parameters, num_samples))
    why = history.rounds[0].missing["1"]
    assert f"num_samples must be a whole number, not a {type(num_samples).__name__}" in why
    assert "Smith" not in why


@pytest.mark.parametrize(
    ("options", "num_samples", "most"), [({}, 2**62, 2**40), ({"max_samples": 100}, 101, 100)]
)
def test_a_client_that_claims_too_many_samples_is_refused(
    options: dict[str, int], num_samples: int, most: int
) -> None:
    history = unhurt(
        fault=lambda parameters: Update(parameters, num_samples), aggregation=FedAvg(**options)
    )
    why = history.rounds[0].missing["1"]
    assert f"num_samples is {num_samples}: more than {most} do not count" in why


@pytest.mark.parametrize("name", ["", "x" * 10_000, "a\x1b[2J"])
def test_names_of_metrics_are_short_and_printable(name: str) -> None:
    history = unhurt(fault=lambda parameters: Update(parameters, 1, {name: 1.0}))
    assert "a metric has 1 to 64 printable characters" in history.rounds[0].missing["1"]


def test_a_client_with_nan_is_refused() -> None:
    history = unhurt(fault=lambda parameters: Update([np.array([1, np.nan, np.inf])], 3))
    assert (
        "parameters[0] has 2 of 3 values that are NaN or infinite"
        in (history.rounds[0].missing["1"])
    )


def test_a_client_with_other_shapes_is_refused() -> None:
    history = unhurt(fault=lambda parameters: Update([np.zeros(4)], 3))
    assert "array 0 has shape (4,), the global one (3,)" in history.rounds[0].missing["1"]
    history = unhurt(fault=lambda parameters: Update({"w": np.zeros(3)}, 3))
    assert "a dict of arrays, not a list" in history.rounds[0].missing["1"]


def test_a_client_that_raises_is_named_with_the_place() -> None:
    def broken(parameters: Any) -> Update:
        raise OSError("the disk is gone")

    history = unhurt(fault=broken)
    why = history.rounds[0].missing["1"]
    assert why.startswith("OSError: the disk is gone (at test_simulation.py:")


def test_a_client_that_returns_something_else_is_refused() -> None:
    history = unhurt(fault=lambda parameters: parameters)
    assert "must return potluck.federated.Update" in history.rounds[0].missing["1"]


# What goes wrong for the server.


def test_fewer_clients_than_asked_is_said_and_the_run_goes_on_or_ends() -> None:
    patience = Patience(min_clients=5)
    history = federated.simulate(lead(patience=patience), counting, num_clients=3)
    assert history.rounds[0].note == "3 clients are there, 5 were asked for (min_clients)"
    np.testing.assert_array_equal(history.parameters[0], [0.0] * 3)
    patience = Patience(min_clients=5, too_few="stop")
    with pytest.raises(FederationError, match="round 1 of 2: 3 clients are there, 5 were asked"):
        federated.simulate(lead(patience=patience), counting, num_clients=3)


def test_a_round_with_too_few_updates_leaves_the_model_as_it_is() -> None:
    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        if config["round"] == 1 and site().index:
            raise RuntimeError
        return counting(parameters, config)

    history = federated.simulate(lead(), train, num_clients=4)
    assert history.rounds[0].note == "1 of at least 2 updates came; the parameters stay"
    np.testing.assert_array_equal(history.parameters[0], [2.5] * 3)
    strict = lead(aggregation=Krum(1), patience=Patience(too_few="stop"))
    with pytest.raises(FederationError, match="4 of at least 5 updates came"):
        federated.simulate(strict, counting, num_clients=4)


def test_a_deadline_ends_a_round_and_names_the_late_client() -> None:
    goes_on = threading.Event()

    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        if site().index == 1 and config["round"] == 1:
            goes_on.wait(60)
        return counting(parameters, config)

    def main(federation: Federation) -> History:
        try:
            return federation.run([np.zeros(1)], rounds=1, patience=Patience(deadline=0.2))
        finally:
            goes_on.set()

    history = federated.simulate(main, train, num_clients=3, num_threads=3)
    [report] = history.rounds
    assert report.missing["1"] == "no answer within 0.2 s"
    # On a busy machine the others may be late, too.
    assert {*report.arrived, *report.missing} == {"0", "1", "2"}
    assert not {*report.arrived} & {*report.missing}


def test_k_of_n_does_not_wait_for_the_slowest() -> None:
    goes_on = threading.Event()

    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        if site().index == 0:
            goes_on.wait(60)
        return counting(parameters, config)

    def main(federation: Federation) -> History:
        try:
            return federation.run([np.zeros(1)], rounds=1, patience=Patience(wait_for=0.6))
        finally:
            goes_on.set()

    history = federated.simulate(main, train, num_clients=5, num_threads=5)
    assert len(history.rounds[0].arrived) == 3
    assert history.rounds[0].missing["0"] == "enough others came first"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rounds": -1}, ValueError, "rounds is -1"),
        ({"aggregation": FedAvg}, TypeError, "an aggregation is an object with configure"),
        ({"aggregation": object()}, TypeError, "has no configure"),
        ({"initial": [np.array([np.nan])]}, ValueError, r"initial\[0\] has 1 of 1 values"),
        ({"initial": np.zeros(3)}, TypeError, "initial must be a list or a dict"),
        ({"initial": {}}, ValueError, "initial has no arrays"),
        ({"secure": True}, TypeError, r"SecureAggregation\(...\) of .* is needed, not True"),
        ({"privacy": True}, TypeError, r"DifferentialPrivacy\(...\) of .* is needed, not True"),
        ({"patience": 0.8}, TypeError, r"Patience\(...\) of .* is needed, not 0.8"),
        ({"initial": ["text"]}, TypeError, r"initial\[0\] has dtype <U4"),
    ],
)
def test_arguments_that_do_not_fit(options: Any, error: type[Exception], text: str) -> None:
    def main(federation: Federation) -> History:
        return federation.run(**{"initial": [np.zeros(3)], "rounds": 1, **options})

    with pytest.raises(error, match=text):
        federated.simulate(main, counting, num_clients=2)


def test_what_an_aggregation_makes_is_checked() -> None:
    class Broken(FedAvg):
        def aggregate(self, round: Any, updates: Any) -> Any:
            return [np.zeros(5)]

    with pytest.raises(ValueError, match=r"Broken.aggregate: array 0 has shape \(5,\)"):
        federated.simulate(lead(aggregation=Broken()), counting, num_clients=2)


@pytest.mark.parametrize("chosen", [["0", "1"], {"0": None}, None])
def test_an_aggregation_that_configures_no_dict_is_told_so(chosen: Any) -> None:
    class Broken(FedAvg):
        def configure(self, round: Any, clients: Any) -> Any:
            return chosen

    with pytest.raises(TypeError, match=r"Broken.configure must return a dict: the clients to ask"):
        federated.simulate(lead(aggregation=Broken()), counting, num_clients=2)


def test_the_last_round_is_told_however_short_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    federated.simulate(lead(rounds=3), counting, num_clients=2)
    assert "round 3 of 3: 2 of 2 clients" in capfd.readouterr().err


def test_marks_are_for_functions_with_the_right_arguments() -> None:
    with pytest.raises(TypeError, match=r"train must take \(parameters, config\)"):

        @federated.client
        def train(parameters: Any) -> None: ...

    with pytest.raises(TypeError, match="marks a function"):
        federated.server(3)
    with pytest.raises(ConfigurationError, match="site"):
        site()

    @federated.client
    def trains(parameters: Any, config: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="trains is the client's function, and that of"):
        federated.simulate(trains, counting, num_clients=2)


def test_files_are_run_as_on_the_cluster_and_each_client_has_its_folder(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "small_model.py").write_text("import numpy as np\nfirst = [np.zeros(2)]\n")
    (code / "fed_server.py").write_text(
        "from potluck import federated\nfrom small_model import first\n\n"
        "@federated.server\ndef main(federation):\n"
        "    return federation.run(first, rounds=1)\n"
    )
    (code / "fed_client.py").write_text(
        "from potluck import federated\n\n"
        "@federated.client\ndef train(parameters, config):\n"
        "    here = federated.site()\n"
        "    value = float((here.data_dir / 'value').read_text())\n"
        "    return federated.Update([each + value for each in parameters], 1)\n"
    )
    folders = []
    for number in range(3):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        (folders[-1] / "value").write_text(str(number))
    history = federated.simulate(
        code / "fed_server.py", code / "fed_client.py", num_clients=3, data_dirs=folders
    )
    np.testing.assert_array_equal(history.parameters[0], [1.0, 1.0])
    with pytest.raises(ConfigurationError, match=r"server; it has: none. It has one with .*client"):
        federated.simulate(code / "fed_client.py", code / "fed_client.py", num_clients=3)
    with pytest.raises(ConfigurationError, match="does not exist"):
        federated.simulate(code / "none.py", code / "fed_client.py", num_clients=3)


def test_a_dict_counts_by_its_names_whatever_their_order() -> None:
    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        found = {"a": parameters["a"] + 1, "b": parameters["b"] + 10}
        return Update(found if site().index % 2 else dict(reversed(found.items())), 1)

    def main(federation: Federation) -> History:
        return federation.run({"a": np.zeros(2), "b": np.zeros(2)}, rounds=1)

    found = federated.simulate(main, train, num_clients=4).parameters
    assert {name: array.tolist() for name, array in found.items()} == {"a": [1, 1], "b": [10, 10]}


def test_a_number_that_the_models_dtype_can_not_hold_is_refused() -> None:
    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        return Update([parameters[0] + (1e300 if site().index == 1 else 1.0)], 1)

    def main(federation: Federation) -> History:
        return federation.run([np.zeros(2, np.float32)], rounds=1)

    with np.errstate(over="ignore"):
        [report] = federated.simulate(main, wide(train), num_clients=4).rounds
    assert report.arrived == ("0", "2", "3")
    assert "infinite" in report.missing["1"]


def wide(train: Callable[..., Update]) -> Callable[..., Update]:
    """The client's function computes in float64."""
    return lambda parameters, config: train([each.astype(float) for each in parameters], config)


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [SystemExit("row 17"), KeyboardInterrupt(), asyncio.CancelledError(), Untellable()]
)
def test_whatever_a_function_raises_its_client_fails_and_the_round_ends(
    error: BaseException,
) -> None:
    def leave(parameters: Any) -> Update:
        raise error

    report = unhurt(fault=leave).rounds[0]
    assert report.missing["1"].startswith(type(error).__name__)


def test_replies_that_lie_there_at_the_deadline_count() -> None:
    class Prompt(SimulatedClients):
        def start(self, method: str, arguments: Any, timeout_s: Any, put: Any) -> Any:
            for client in arguments:
                put(Reply(client, {"n": client}))
            return lambda: None

    clients = Prompt({}, 1)
    asked: dict[str, dict[str, Any]] = {"0": {}, "1": {}, "2": {}}
    gathered = Federation(clients, seed=0).gather("train", asked, 3, 0.0, lambda client, a: a["n"])
    clients.close()
    assert list(gathered.answers) == ["0", "1", "2"]
