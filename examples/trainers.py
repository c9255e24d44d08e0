"""Three trainers with one interface: a network, k-means and a random forest, on split digits.

python examples/trainers.py                                        alone
potluck run --workers 2 examples/trainers.py                       two workers
potluck run --workers 2 examples/trainers.py --strategy federated  by another strategy
"""

import argparse
import sys

try:
    import torch  # noqa: F401  (the network's trainer needs it)
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"trainers.py needs {error.name}: pip install 'potluck[torch,sklearn]'")

import potluck
from potluck import TrainingStrategy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [each.value for each in TrainingStrategy]
    parser.add_argument("--strategy", choices=names, default="data_parallel", help="the network's")
    args = parser.parse_args()

    with potluck.init() as ctx:
        X, y = load_digits(return_X_y=True)
        X /= 16
        parts = potluck.DataPartitioner(1400, ctx.world_size, "stratified", labels=y[:1400])
        mine = parts.get_indices(ctx.rank)

        strategy = TrainingStrategy(args.strategy)
        with potluck.DistributedNeuralNetTrainer(
            ctx, strategy, input_dim=64, hidden_dims=[64, 32], output_dim=10
        ) as net:  # its end ends a parameter server
            net.train(X[mine], y[mine], epochs=15)

        forest = potluck.DistributedRandomForestTrainer(ctx, 50, random_state=0)
        forest.train_epoch(X[mine], y[mine])

        clusters = potluck.DistributedKMeansTrainer(ctx, 10, random_state=0)
        spread = clusters.train_epoch(X[mine])

        right = {
            "network": (net.predict(X[1400:]).argmax(axis=1) == y[1400:]).mean(),
            "forest": (forest.predict(X[1400:]) == y[1400:]).mean(),
        }
        if ctx.is_master:
            for name, accuracy in right.items():
                print(f"{name}: test accuracy {accuracy:.3f}")
            print(f"k-means: mean squared distance {spread:.2f}")
        if min(right.values()) < 0.85:
            sys.exit("a test accuracy is below 0.85")


if __name__ == "__main__":
    main()
