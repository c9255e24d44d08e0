"""Search the best hyperparameters for handwritten digits: tasks of unlike cost for all workers.

python examples/work_queue.py                      alone
potluck run --workers 4 examples/work_queue.py     each takes a task whenever it is free
"""

import itertools
import sys

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import SVC
except ModuleNotFoundError:
    sys.exit("work_queue.py needs scikit-learn: pip install 'potluck[sklearn]'")

import potluck


def main():
    with potluck.init() as ctx:
        X, y = load_digits(return_X_y=True)
        X, y = X[::2] / 16, y[::2]  # on every worker; a task is a few numbers
        tasks = [
            {"C": C, "gamma": gamma}
            for C, gamma in itertools.product([0.1, 1.0, 10.0], [0.001, 0.01, 0.1, 1.0])
        ]
        with potluck.WorkQueue(ctx, tasks if ctx.is_master else None) as queue:
            for task in queue:
                scores = cross_val_score(SVC(**task.payload), X, y, cv=3)
                queue.finish(task, {"accuracy": float(scores.mean()), "by": ctx.rank})
            results = queue.results()

        best = max(range(len(tasks)), key=lambda number: results[number]["accuracy"])
        accuracy = results[best]["accuracy"]
        if ctx.is_master:
            for task, result in zip(tasks, results, strict=True):
                print(f"{task}: accuracy {result['accuracy']:.3f}, by worker {result['by']}")
            print(f"best: {tasks[best]}, accuracy {accuracy:.3f}")
        if accuracy < 0.95:
            sys.exit("the best accuracy is below 0.95")


if __name__ == "__main__":
    main()
