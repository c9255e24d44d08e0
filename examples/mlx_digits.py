"""Train a small network of MLX on handwritten digits, alone or on many workers.

python examples/mlx_digits.py
potluck run --workers 4 examples/mlx_digits.py
potluck run --workers 4 --chaos "kill rank 2 at step 60" examples/mlx_digits.py

A lost worker costs one step; one that comes back receives the state from the others. On Linux MLX
computes on the CPU (pip install 'mlx[cpu]').
"""

import argparse
import sys

import numpy as np

try:
    import mlx.core as mx
    from mlx import nn, optimizers
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("mlx_digits.py needs: pip install 'potluck[mlx,sklearn]'")

import potluck
import potluck.mlx as pm
from potluck.training import ElasticLoop, Schedule


def loss_of(model, x, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--require-accuracy", type=float, default=0.94)
    parser.add_argument("--checkpoint", metavar="DIR", help="keep the state there, go on from it")
    args = parser.parse_args(argv)

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    test = np.arange(len(y)) % 5 == 0
    train_x, train_y = x[~test], y[~test]

    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optimizers.Adam(learning_rate=3e-3)
    optimizer.init(model.trainable_parameters())
    value_and_grad = nn.value_and_grad(model, loss_of)

    with potluck.init() as ctx:
        store = args.checkpoint and potluck.checkpoint.CheckpointStore(args.checkpoint)
        schedule = Schedule(len(train_y), 64, epochs=args.epochs)
        replica = pm.PytreeReplica(model, optimizer)
        job = ElasticLoop(ctx, schedule, replica, checkpoint=store or None)
        for share in job:
            with job.step():
                some = mx.array(train_x[share.indices]), mx.array(train_y[share.indices])
                loss, gradients = value_and_grad(model, *some)
                gradients = pm.average_gradients(ctx, gradients, weight=share.weight)
                job.commit(loss=loss.item())  # returns once all ranks have these gradients
                optimizer.update(model, gradients)

        found = model(mx.array(x[test])).argmax(1)
        accuracy = float((np.array(found) == y[test]).mean())
        job.log(test_accuracy=accuracy)
        if ctx.is_master:
            print(f"test accuracy {accuracy:.4f} after {job.step_number} steps")
    if accuracy < args.require_accuracy:
        sys.exit(f"the test accuracy is below {args.require_accuracy}")


if __name__ == "__main__":
    main()
