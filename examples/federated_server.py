"""A federation that learns handwritten digits: ten rounds of FedAvg; see federated_client.py.

python examples/federated_server.py        a simulation of 20 clients in one process
potluck federated run -n 4 examples/federated_server.py --clients examples/federated_client.py
"""

import sys
from pathlib import Path

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("federated_server.py needs scikit-learn: pip install 'potluck[sklearn]'")

import numpy as np

from potluck import federated
from potluck.federated import FedAvg, Patience


def test_accuracy(number, parameters):
    x, y = load_digits(return_X_y=True)
    logits = x[1400:] / 16 @ parameters["weights"] + parameters["bias"]
    return {"test_accuracy": (logits.argmax(axis=1) == y[1400:]).mean()}


@federated.server
def main(federation):
    history = federation.run(
        {"weights": np.zeros((64, 10)), "bias": np.zeros(10)},
        rounds=10,
        aggregation=FedAvg(fraction=1.0, config={"local_epochs": 3}),
        patience=Patience(min_clients=2, wait_for=1.0),
        evaluate=test_accuracy,
    )
    accuracy = history.rounds[-1].evaluation["test_accuracy"]
    print(f"test accuracy {accuracy:.3f} after {len(history.rounds)} rounds")
    if accuracy < 0.7:  # two clients that have few of some digits: 0.76; twenty: 0.85
        sys.exit("the test accuracy is below 0.7")
    return history


if __name__ == "__main__":
    client = Path(__file__).with_name("federated_client.py")
    federated.simulate(main, client, num_clients=20)
