"""The client of a federation: trains softmax regression on its own handwritten digits.

See federated_server.py. With --data-dir a client's digits are in the file digits.npz of that folder
of its machine (arrays x, of shape (n, 64), and y). Without it each client has a part of
scikit-learn's digits, with unlike classes.
"""

import functools

import numpy as np
from sklearn.datasets import load_digits

import potluck
from potluck import federated


@functools.cache
def my_digits(here):
    if here.data_dir is not None:
        with np.load(here.data_dir / "digits.npz") as file:
            return file["x"], file["y"]
    x, y = load_digits(return_X_y=True)
    parts = potluck.DataPartitioner(1400, here.num_clients, "dirichlet", labels=y[:1400])
    mine = parts.get_indices(here.index)
    return x[mine] / 16, y[mine]


def probabilities(parameters, x):
    logits = x @ parameters["weights"] + parameters["bias"]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@federated.client
def train(parameters, config):
    x, y = my_digits(federated.site())
    before = (probabilities(parameters, x).argmax(axis=1) == y).mean()
    random = np.random.default_rng(config["seed"])
    for _ in range(config["local_epochs"]):
        order = random.permutation(len(x))
        for start in range(0, len(x), 16):
            batch = order[start : start + 16]
            error = probabilities(parameters, x[batch]) - np.eye(10)[y[batch]]
            parameters["weights"] -= 0.5 * x[batch].T @ error / len(batch)
            parameters["bias"] -= 0.5 * error.mean(axis=0)
    return federated.Update(parameters, num_samples=len(x), metrics={"accuracy_before": before})
