"""Classify digits that lie on workers in unequal parts: messages and uneven collectives.

python examples/messages.py                      alone
potluck run --workers 3 examples/messages.py     three workers, with few kinds of digits each

Worker 0 deals the digits out. Each worker averages those of each kind that it has, and sends these
centers to worker 0: how many there are, only the sender knows. Worker 0 makes one classifier of
them for all. Each worker tests it, and all hear which digits were taken for another.
"""

import sys

import numpy as np

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("messages.py needs scikit-learn: pip install 'potluck[sklearn]'")

import potluck

NUM_TRAIN = 1400


def dealt(ctx, X, y):
    """This worker's digits. Worker 0 alone needs the data; the others pass None."""
    parts = potluck.DataPartitioner(
        NUM_TRAIN, ctx.world_size, "dirichlet", labels=y[:NUM_TRAIN], alpha=0.1
    )
    ranks = range(ctx.world_size)
    order = np.concatenate([parts.get_indices(rank) for rank in ranks])
    counts = [parts.partition_size(rank) for rank in ranks]
    mine_X = ctx.scatter_uneven(X[order] if ctx.is_master else None, counts=counts)
    mine_y = ctx.scatter_uneven(y[order] if ctx.is_master else None, counts=counts)
    return mine_X, mine_y


def agreed(ctx, mine):
    """The centers of all workers as one classifier, on all: a matrix, and the digit of each row."""
    if not ctx.is_master:
        ctx.send_message(mine, dst=0)
        return ctx.recv_message(src=0).payload
    sums, counts = {}, {}
    found = [mine] + [ctx.recv_message().payload for _ in range(1, ctx.world_size)]
    for each in found:
        for digit, center in each["centers"].items():
            weight = each["counts"][digit]
            sums[digit] = sums.get(digit, 0) + weight * center
            counts[digit] = counts.get(digit, 0) + weight
    digits = sorted(sums)
    centers = np.stack([sums[digit] / counts[digit] for digit in digits])
    classifier = {"digits": np.array(digits), "centers": centers}
    for rank in range(1, ctx.world_size):
        ctx.send_message(classifier, dst=rank)
    return classifier


def main():
    with potluck.init() as ctx:
        X, y = load_digits(return_X_y=True)
        mine_X, mine_y = dealt(ctx, X, y)
        kinds, counts = np.unique(mine_y, return_counts=True)
        print(f"rank {ctx.rank} has {len(mine_y)} digits: {', '.join(map(str, kinds))}")
        mine = {
            "centers": {int(kind): mine_X[mine_y == kind].mean(axis=0) for kind in kinds},
            "counts": {int(kind): int(n) for kind, n in zip(kinds, counts, strict=True)},
        }
        classifier = agreed(ctx, mine)

        tested = np.arange(NUM_TRAIN + ctx.rank, len(X), ctx.world_size)
        distances = ((X[tested][:, None] - classifier["centers"]) ** 2).sum(axis=2)
        guessed = classifier["digits"][distances.argmin(axis=1)]
        wrong = tested[guessed != y[tested]]
        # A worker with more wrong ones has a longer part.
        wrong = np.sort(np.concatenate(ctx.all_gather_uneven(wrong)))
        accuracy = 1 - len(wrong) / (len(X) - NUM_TRAIN)
        if ctx.is_master:
            print(f"test accuracy {accuracy:.3f}; wrong: digits {wrong[:5].tolist()} and others")
        if accuracy < 0.8:
            sys.exit("the test accuracy is below 0.8")


if __name__ == "__main__":
    main()
