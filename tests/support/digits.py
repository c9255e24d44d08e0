"""Handwritten digits for federations: a client that trains softmax regression, and the test set."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck import federated
from potluck.federated.parameters import Parameters
from potluck.training.partition import DataPartitioner

NUM_TRAIN = 1400
CLASSES = 10


@functools.cache
def digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """1,797 images of 64 values from 0 to 1, in a fixed random order, and their classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order] / 16, y[order]


def zeros() -> Parameters:
    """Weights and biases before training."""
    return {"weights": np.zeros((64, CLASSES)), "bias": np.zeros(CLASSES)}


def predictions(parameters: Any, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probabilities of the classes."""
    logits = x @ parameters["weights"] + parameters["bias"]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def accuracy(parameters: Any) -> float:
    """The part of the test images that are classified right."""
    x, y = digits()
    found = predictions(parameters, x[NUM_TRAIN:]).argmax(axis=1)
    return float((found == y[NUM_TRAIN:]).mean())


@functools.cache
def part_of(index: int, num_clients: int) -> NDArray[np.int64]:
    """The samples of one client, by a Dirichlet distribution over the classes."""
    y = digits()[1][:NUM_TRAIN]
    split = DataPartitioner(NUM_TRAIN, num_clients, "dirichlet", labels=y, alpha=1.0)
    return split.get_indices(index)


def alike(index: int, num_clients: int) -> NDArray[np.int64]:
    """The samples of one client among clients with the same distribution."""
    return DataPartitioner(NUM_TRAIN, num_clients, "strided").get_indices(index)


def trained(parameters: Any, config: Mapping[str, Any], rows: NDArray[np.int64]) -> Any:
    """Some epochs of SGD on ``rows``, with the proximal term of FedProx if asked for."""
    x, y = digits()
    first = {name: array.copy() for name, array in parameters.items()}
    random = np.random.default_rng(config["seed"])
    mu = float(config.get("proximal_mu", 0.0))
    for _ in range(int(config.get("local_epochs", 2))):
        order = random.permutation(rows)
        for start in range(0, len(order), 16):
            batch = order[start : start + 16]
            error = predictions(parameters, x[batch]) - np.eye(CLASSES)[y[batch]]
            gradients = {"weights": x[batch].T @ error / len(batch), "bias": error.mean(axis=0)}
            for name, gradient in gradients.items():
                pull = mu * (parameters[name] - first[name])
                parameters[name] -= 0.5 * (gradient + pull)
    return parameters


@federated.client
def train(parameters: Any, config: Mapping[str, Any]) -> federated.Update:
    """The client of a simulation."""
    here = federated.site()
    rows = part_of(here.index, here.num_clients)
    return federated.Update(trained(parameters, config, rows), len(rows))
