"""``potluck federated run`` on one machine: real workers, services over TLS, SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command, potluck_command

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVER = """
import json, pathlib
import numpy as np
from potluck import federated
from potluck.federated import FedAvg, Patience

OPTIONS = json.loads((pathlib.Path(__file__).parent / "options.json").read_text())

@federated.server
def main(federation):
    history = federation.run(
        [np.zeros(3)],
        rounds=OPTIONS["rounds"],
        aggregation=FedAvg(config={"faults": OPTIONS["faults"]}),
        patience=Patience(**OPTIONS["patience"]),
    )
    print("result", history.parameters[0][0], flush=True)
"""
CLIENT = """
import os
import numpy as np
from potluck import federated

@federated.client
def train(parameters, config):
    here = federated.site()
    fault = config["faults"].get(f"{here.client} {config['round']}")
    if "random" in config["faults"] and np.random.default_rng(config["seed"]).random() < 0.3:
        fault = "kill"
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "raise":
        raise KeyError("who")
    value = float((here.data_dir / "value").read_text()) if here.data_dir else 1.0
    place = {f"client {here.client} is {here.index} of {here.num_clients}": 1.0}
    return federated.Update([each + value for each in parameters], 1, place)
"""


EXACT = {"min_clients": 3, "deadline": 60.0}
"""For figures that must be exact: the adaptive deadline of clients this quick is a second."""


class Federation:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        options = {"rounds": 4, "faults": {}, "patience": EXACT, **options}
        (folder / "options.json").write_text(json.dumps(options))
        (folder / "server.py").write_text(SERVER)
        (folder / "client.py").write_text(CLIENT)

    def run(self, *words: str, clients: int = 3) -> Command:
        self.json = self.folder / "out.json"
        command = [*potluck_command(), "federated", "run", "--workers", str(clients)]
        files = [str(self.folder / "server.py"), "--clients", str(self.folder / "client.py")]
        options = ["--include", "options.json", "--json", str(self.json), *words]
        return Command([*command, *options, *files])

    def rounds(self) -> list[dict[str, Any]]:
        [found] = json.loads(self.json.read_text())["runs"]
        return list(found["rounds"])


def test_clients_that_die_or_raise_are_missed_in_one_round_only(tmp_path: Path) -> None:
    federation = Federation(tmp_path, faults={"2 2": "kill", "1 3": "raise"})
    data = tmp_path / "data"
    data.mkdir()
    (data / "value").write_text("2")
    with federation.run("--data-dir", str(data)) as run:
        assert run.finish() == 0, run.text
        assert "[0] result 8.0" in run.text
    rounds = federation.rounds()
    for number in (0, 3):  # also of clients that were started again: as in a simulation
        places = {f"client {n + 1} is {n} of 3" for n in range(3)}
        assert rounds[number]["metrics"].keys() == places
    assert [each["arrived"] for each in rounds] == [
        ["1", "2", "3"],
        ["1", "3"],
        ["2", "3"],
        ["1", "2", "3"],
    ]
    assert rounds[1]["missing"] == {"2": "it ended, or can't be reached"}
    assert rounds[2]["missing"]["1"].startswith("KeyError: 'who' (at client.py:")


def test_a_client_that_can_not_be_loaded_says_why_and_the_run_ends_as_asked(
    tmp_path: Path,
) -> None:
    patience = {"min_clients": 2, "start_s": 20, "too_few": "stop"}
    federation = Federation(tmp_path, patience=patience)
    (tmp_path / "client.py").write_text("from potluck import federated\n1 / 0\n")
    with federation.run(clients=2) as run:
        assert run.finish() == 1, run.text
        said = "client 1 takes no part: client.py can't be loaded: ZeroDivisionError"
        assert said in run.text
        assert "no client can take part: client 1: client.py can't be loaded" in run.text


def test_a_run_whose_clients_all_can_not_take_part_ends_at_once_and_not_after_each_round(
    tmp_path: Path,
) -> None:
    federation = Federation(tmp_path, rounds=1000, patience={"min_clients": 1, "start_s": 5})
    with federation.run("--data-dir", "/none/here", clients=1) as run:
        assert run.finish() == 1, run.text
        why = "there is no folder /none/here here (--data-dir)"
        assert f"client 1 takes no part: {why}" in run.text
        assert f"FederationError: no client can take part: client 1: {why}" in run.text
    assert json.loads(federation.json.read_text())["runs"] == []


def test_the_example_runs_by_the_command_too() -> None:
    files = ["federated_server.py", "--clients", "federated_client.py"]
    command = [*potluck_command(), "federated", "run", "--workers", "3", *files]
    with Command(command, cwd=EXAMPLES) as run:
        assert run.finish() == 0, run.text
        assert "test accuracy 0." in run.text
        assert "round 10 of 10: " in run.text  # the last round is always told


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_round_goes_past_its_deadline_though_a_third_of_the_clients_die_in_each(
    tmp_path: Path,
) -> None:
    patience = {"min_clients": 5, "deadline": 20.0, "start_s": 120, "min_updates": 1}
    federation = Federation(tmp_path, rounds=50, faults={"random": True}, patience=patience)
    with federation.run(clients=6) as run:
        assert run.finish(1700) == 0, run.text
    rounds = federation.rounds()
    assert len(rounds) == 50
    num_killed = sum(len(each["missing"]) for each in rounds)
    num_asked = sum(len(each["asked"]) for each in rounds)
    print(
        f"{num_killed} of {num_asked} calls ended by SIGKILL; the longest round took "
        f"{max(each['seconds'] for each in rounds):.2f} s of 20 s"
    )
    assert 0.15 < num_killed / num_asked < 0.45
    assert all(each["seconds"] <= 20.0 for each in rounds)
    assert sum(not each["note"] for each in rounds) > 40
