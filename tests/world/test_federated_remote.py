"""A federation over the services of a world: the server on rank 0, clients on the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.errors import HandlerError
from potluck.federated import Federation, History, Patience, SecureAggregation, Site, Update
from potluck.federated.participant import Participant
from potluck.federated.remote import CLIENT_SERVICE, RemoteClients, serve_client
from potluck.testing.world import run_world


def train(parameters: Any, config: Mapping[str, Any]) -> Update:
    return Update([each + config["step"] for each in parameters], 2, {"loss": 0.5})


class Step:
    """All clients that are there, each with the same step."""

    takes_mean = True

    def configure(self, round: Any, clients: Any) -> Mapping[str, Any]:
        return {client: {"step": np.float64(0.25)} for client in clients}

    def aggregate(self, round: Any, updates: Any) -> Any:
        return [sum(each.parameters[0] for each in updates) / len(updates)]


@pytest.mark.parametrize("secure", [None, SecureAggregation()])
def test_rounds_over_services(secure: SecureAggregation | None) -> None:
    def run(ctx: DistributedContext) -> History | None:
        if ctx.rank == 0:
            clients = RemoteClients(ctx)
            patience = Patience(min_clients=3, deadline=60.0)  # "adaptive": a second
            federation = Federation(clients, say=lambda text: None)
            options = {"rounds": 3, "aggregation": Step(), "patience": patience, "secure": secure}
            history = federation.run([np.zeros(5)], **options)
            clients.stop()
            return history
        name = ctx.group.me.worker
        participant = Participant(train, Site(name, ctx.rank, 0, None), sends_texts=True)
        serve_client(ctx, participant, threading.Event())
        return None

    history = run_world(4, run)[0]
    assert history is not None
    np.testing.assert_allclose(history.parameters[0], 0.75, atol=1e-6)
    assert [each.arrived for each in history.rounds] == [("1", "2", "3")] * 3
    assert [each.missing for each in history.rounds] == [{}] * 3
    if secure is None:
        assert history.rounds[0].metrics == {"loss": 0.5}


def test_only_the_server_may_call_a_client() -> None:
    def run(ctx: DistributedContext) -> str:
        if ctx.rank == 0:
            clients = RemoteClients(ctx)
            assert clients.wait(1, 20.0) == ["1"]
            message = ctx.recv_message(src=2)
            clients.stop()
            return str(message.payload)
        if ctx.rank == 1:
            participant = Participant(train, Site("1", 1, 0, None), sends_texts=True)
            serve_client(ctx, participant, threading.Event())
            return ""
        client = ctx.connect(CLIENT_SERVICE, rank=1)
        with pytest.raises(HandlerError) as caught:
            client.answer("1", "train", {"parameters": [np.zeros(1)], "config": {}})
        ctx.send_message(str(caught.value), dst=0)
        return ""

    assert "only the federation's server may call its clients" in run_world(3, run)[0]


def test_a_client_that_missed_its_deadline_is_asked_again_when_it_is_free() -> None:
    is_free = threading.Event()
    seen: list[list[str]] = []

    class AsksAll(Step):
        def configure(self, round: Any, clients: Any) -> Mapping[str, Any]:
            seen.append(list(clients))
            return super().configure(round, clients)

    def slow(parameters: Any, config: Mapping[str, Any]) -> Update:
        if config["round"] == 1:
            assert is_free.wait(30)
        return train(parameters, config)

    def run(ctx: DistributedContext) -> History | None:
        if ctx.rank == 0:
            clients = RemoteClients(ctx)
            assert clients.wait(2, 20.0) == ["1", "2"]

            def evaluate(number: int, parameters: Any) -> Mapping[str, float]:
                if number == 2:
                    is_free.set()
                    assert clients.wait(2, 20.0) == ["1", "2"]
                return {}

            patience = Patience(min_clients=1, deadline=6.0, min_updates=1)
            federation = Federation(clients, say=lambda text: None)
            options = {"rounds": 3, "aggregation": AsksAll(), "patience": patience}
            history = federation.run([np.zeros(5)], evaluate=evaluate, **options)
            clients.stop()
            return history
        name = ctx.group.me.worker
        function = train if ctx.rank == 1 else slow
        participant = Participant(function, Site(name, ctx.rank, 0, None), sends_texts=True)
        serve_client(ctx, participant, threading.Event())
        return None

    history = run_world(3, run)[0]
    assert history is not None
    assert seen == [["1", "2"], ["1"], ["1", "2"]]
    assert history.rounds[0].missing == {"2": "no answer within 6.0 s"}
    assert history.rounds[2].arrived == ("1", "2")
