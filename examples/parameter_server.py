"""Classify handwritten digits with a parameter server that never waits for a slow worker.

python examples/parameter_server.py                                  alone
potluck run --workers 4 examples/parameter_server.py                 asynchronous
potluck run --workers 4 examples/parameter_server.py --synchronous   a step waits for all workers
potluck run --workers 4 examples/parameter_server.py --servers 2     two workers keep the parameters
potluck run --workers 4 examples/parameter_server.py --servers 2 --replicas 1    and either may die
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("parameter_server.py needs scikit-learn: pip install 'potluck[sklearn]'")

import potluck
from potluck.parameter_server import SGD, Asynchronous, Synchronous
from potluck.torch import ServerOptimizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--synchronous", action="store_true")
    parser.add_argument("--servers", type=int, default=1, help="how many workers keep parameters")
    parser.add_argument("--replicas", type=int, default=0, help="how many of them may be lost")
    parser.add_argument("--epochs", type=int, default=25)
    arguments = parser.parse_args()

    with potluck.init() as ctx:
        X, y = load_digits(return_X_y=True)
        X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
        parts = potluck.DataPartitioner(1400, ctx.world_size, "stratified", labels=y[:1400])
        mine = torch.from_numpy(parts.get_indices(ctx.rank))

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        mode = Synchronous() if arguments.synchronous else Asynchronous()
        ps = potluck.ParameterServer(
            ctx,
            mode,
            optimizer=SGD(0.2),
            servers=arguments.servers,
            replicas=arguments.replicas,
        )
        optimizer = ServerOptimizer(model, ps)

        torch.manual_seed(1 + ctx.rank)
        for _ in range(arguments.epochs):
            for batch in mine[torch.randperm(len(mine))].split(50):
                optimizer.zero_grad()
                cross_entropy(model(X[batch]), y[batch]).backward()
                optimizer.step()
        stats = ps.stats()["model"]
        ps.close()

        accuracy = (model(X[1400:]).argmax(1) == y[1400:]).float().mean().item()
        if ctx.is_master:
            print(f"{stats['counted']} gradients in {stats['version']} updates")
            print(f"test accuracy {accuracy:.3f}")
        if accuracy < 0.87:
            sys.exit("the test accuracy is below 0.87")


if __name__ == "__main__":
    main()
