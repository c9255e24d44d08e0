"""The same federation on Flower: run by benchmarks/federated.py in an environment that has it.

python benchmarks/common/federated_flower.py NUM_CLIENTS ROUNDS RESULT.json
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent))
# The simulation's workers import the task as well.
os.environ["PYTHONPATH"] = str(Path(__file__).parent)

import federated_task as task  # type: ignore[import-not-found]
from flwr.app import (  # type: ignore[import-not-found]
    ArrayRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]

NUM_CLIENTS, ROUNDS, RESULT = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    import federated_task as task

    number = int(message.content["config"]["server-round"])
    client = int(context.node_config["partition-id"])
    num_clients = int(context.node_config["num-partitions"])
    parameters = message.content["arrays"].to_numpy_ndarrays()
    new, num_samples = task.train(parameters, client, num_clients, number)
    content = {
        "arrays": ArrayRecord(new),
        "metrics": MetricRecord({"num-examples": num_samples}),
    }
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    ends: list[float] = []
    accuracies: list[float] = []

    def evaluate(number: int, arrays: Any) -> Any:
        ends.append(time.perf_counter())
        accuracies.append(task.accuracy(arrays.to_numpy_ndarrays()))
        return MetricRecord({"accuracy": accuracies[-1]})

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=NUM_CLIENTS)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.first()),
        num_rounds=ROUNDS,
        evaluate_fn=evaluate,
    )
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    RESULT.write_text(json.dumps({"seconds": seconds, "accuracies": accuracies[1:]}))


if __name__ == "__main__":
    cores = os.cpu_count() or 1
    run_simulation(
        server_app,
        client_app,
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "init_args": {"num_cpus": cores, "include_dashboard": False},
            "client_resources": {"num_cpus": 1.0},
        },
    )
