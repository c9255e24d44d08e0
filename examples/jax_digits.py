"""Train a small network of JAX and Optax on handwritten digits, alone or on many workers.

python examples/jax_digits.py
potluck run --workers 4 examples/jax_digits.py
potluck run --workers 4 --chaos "kill rank 2 at step 60" examples/jax_digits.py

A lost worker costs one step; one that comes back receives the state from the others.
"""

import argparse
import sys

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("jax_digits.py needs: pip install 'potluck[jax,sklearn]'")

import potluck
import potluck.jax as pj
from potluck.training import ElasticLoop, Schedule


def network(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def layer(key, num_in, num_out):
    return {"w": jax.random.normal(key, (num_in, num_out)) / num_in**0.5, "b": jnp.zeros(num_out)}


@jax.jit
@jax.value_and_grad
def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()


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

    optimizer = optax.adam(3e-3)
    keys = jax.random.split(jax.random.key(0))
    params = {"hidden": layer(keys[0], 64, 64), "out": layer(keys[1], 64, 10)}

    @jax.jit  # no collective in here: the gradients are means already
    def updated(tree, gradients):
        updates, state = optimizer.update(gradients, tree["optimizer"])
        return {"params": optax.apply_updates(tree["params"], updates), "optimizer": state}

    with potluck.init() as ctx:
        replica = pj.PytreeReplica({"params": params, "optimizer": optimizer.init(params)})
        store = args.checkpoint and potluck.checkpoint.CheckpointStore(args.checkpoint)
        schedule = Schedule(len(train_y), 64, epochs=args.epochs)
        job = ElasticLoop(ctx, schedule, replica, checkpoint=store or None)
        for share in job:
            with job.step():
                some = share.indices
                loss, gradients = loss_of(replica.tree["params"], train_x[some], train_y[some])
                gradients = pj.average_gradients(ctx, gradients, weight=share.weight)
                job.commit(loss=float(loss))  # returns once all ranks have these gradients
                replica.tree = updated(replica.tree, gradients)

        found = network(replica.tree["params"], x[test]).argmax(1)
        accuracy = float((np.asarray(found) == y[test]).mean())
        job.log(test_accuracy=accuracy)
        if ctx.is_master:
            print(f"test accuracy {accuracy:.4f} after {job.step_number} steps")
    if accuracy < args.require_accuracy:
        sys.exit(f"the test accuracy is below {args.require_accuracy}")


if __name__ == "__main__":
    main()
