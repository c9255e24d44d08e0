"""The task of benchmarks/federated.py, for both frameworks: a perceptron on handwritten digits.

Needs NumPy and scikit-learn only, since Flower's environment does not have potluck.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

NUM_TRAIN, HIDDEN, CLASSES = 1400, 64, 10
EPOCHS, BATCH, RATE = 2, 16, 0.2

Arrays = list[NDArray[Any]]


@functools.cache
def digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """All images, from 0 to 1, in a fixed random order, and their classes."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x[order] / 16).astype(np.float32), y[order]


@functools.cache
def split(num_clients: int, seed: int = 0) -> list[NDArray[Any]]:
    """The samples of each client: of each class a Dirichlet(1) part; none is without a sample."""
    random = np.random.default_rng(seed)
    y = digits()[1][:NUM_TRAIN]
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    for label in range(CLASSES):
        rows = np.flatnonzero(y == label)
        shares = random.dirichlet(np.ones(num_clients))
        ends = np.rint(np.cumsum(shares) * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, ends[:-1]), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.array(sorted(part)) for part in parts]


def first(seed: int = 0) -> Arrays:
    """The parameters before training, float32."""
    random = np.random.default_rng(seed)
    layers: Arrays = []
    for inner, outer in ((64, HIDDEN), (HIDDEN, CLASSES)):
        layers.append((random.normal(size=(inner, outer)) / np.sqrt(inner)).astype(np.float32))
        layers.append(np.zeros(outer, np.float32))
    return layers


def train(parameters: Arrays, client: int, num_clients: int, number: int) -> tuple[Arrays, int]:
    """The parameters after this client's epochs in round ``number``, and its number of samples."""
    w1, b1, w2, b2 = (each.copy() for each in parameters)
    x, y = digits()
    rows = split(num_clients)[client]
    random = np.random.default_rng([number, client])
    for _ in range(EPOCHS):
        order = random.permutation(rows)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            hidden = np.maximum(x[batch] @ w1 + b1, 0)
            error = softmax(hidden @ w2 + b2)
            error[np.arange(len(batch)), y[batch]] -= 1
            error /= len(batch)
            back = (error @ w2.T) * (hidden > 0)
            w2 -= RATE * hidden.T @ error
            b2 -= RATE * error.sum(axis=0)
            w1 -= RATE * x[batch].T @ back
            b1 -= RATE * back.sum(axis=0)
    return [w1, b1, w2, b2], len(rows)


def accuracy(parameters: Arrays) -> float:
    """The part of the test images that are classified right."""
    w1, b1, w2, b2 = parameters
    x, y = digits()
    hidden = np.maximum(x[NUM_TRAIN:] @ w1 + b1, 0)
    return float(((hidden @ w2 + b2).argmax(axis=1) == y[NUM_TRAIN:]).mean())


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """The probabilities of the classes."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
