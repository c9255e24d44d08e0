"""Classify handwritten digits with scikit-learn's estimators, on data that is split among workers.

python examples/estimators.py                      alone
potluck run --workers 4 examples/estimators.py     four workers, each with a quarter of the digits
"""

import sys

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("estimators.py needs scikit-learn: pip install 'potluck[sklearn]'")

import potluck
from potluck.estimators import LogisticRegression, RandomForestClassifier, StandardScaler


def main():
    with potluck.init() as ctx:
        X, y = load_digits(return_X_y=True)
        train, test = X[:1400], X[1400:]
        parts = potluck.DataPartitioner(1400, ctx.world_size, "stratified", labels=y[:1400])
        mine = parts.get_indices(ctx.rank)

        scaler = StandardScaler(ctx=ctx).fit(train[mine])
        line = LogisticRegression(C=0.1, ctx=ctx)
        line.fit(scaler.transform(train[mine]), y[mine])
        forest = RandomForestClassifier(100, random_state=0, ctx=ctx).fit(train[mine], y[mine])

        scores = {
            "logistic regression": line.score(scaler.transform(test), y[1400:]),
            "forest": forest.score(test, y[1400:]),
        }
        if ctx.is_master:
            for name, score in scores.items():
                print(f"{name}: test accuracy {score:.3f}")
        if min(scores.values()) < 0.87:
            sys.exit("a test accuracy is below 0.87")


if __name__ == "__main__":
    main()
