"""Search hyperparameters with Optuna on all workers; a lost machine costs one trial, run again.

python examples/sweep.py                                   alone
potluck run --workers 4 examples/sweep.py                  a trial a worker; bad ones are pruned
potluck run --workers 4 examples/sweep.py --spans-workers  one trial at a time, on all of them

The second way is for models that take all machines. Any worker may be lost there; with a trial a
worker, any but worker 0, which keeps the study.
"""

import argparse
import json
import sys

try:
    import optuna
    import torch
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial
    from sklearn.datasets import load_digits
    from torch import nn
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0].replace("sklearn", "scikit-learn")
    sys.exit(f"sweep.py needs the Python package {package}: pip install {package}")

import potluck
import potluck.torch as pt
from potluck.errors import PeerLost

SPACE = {
    "rate": FloatDistribution(1e-3, 1.0, log=True),
    "width": IntDistribution(8, 128, log=True),
    "dropout": FloatDistribution(0.0, 0.6),
}
LINE = 1 << 16  # bytes of what rank 0 tells the others before a trial


def new_study(history=()):
    """A study that knows the trials of ``history``, as dicts."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=len(history), constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
    )
    for each in history:
        study.add_trial(
            create_trial(
                state=TrialState.PRUNED if each["pruned"] else TrialState.COMPLETE,
                params=each["params"],
                distributions=SPACE,
                value=each["values"][-1],
                intermediate_values=dict(enumerate(each["values"])),
            )
        )
    return study


def new_model(params):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, params["width"]), nn.ReLU(), nn.Dropout(params["dropout"]),
        nn.Linear(params["width"], 10),
    )  # fmt: skip
    return model


def train_epoch(model, optimizer, data, rank=0, world_size=1):
    """Each batch of 64 in ``world_size`` parts, of which this is part ``rank``."""
    X, y = data
    model.train()
    for batch in torch.randperm(1200, generator=torch.Generator().manual_seed(0)).split(64):
        mine = batch[rank::world_size]
        if world_size > 1:
            model.weight = len(mine) / len(batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[mine]), y[mine]).backward()
        optimizer.step()


def accuracy(model, data):
    X, y = data
    model.eval()
    with torch.no_grad():
        return (model(X[1200:]).argmax(1) == y[1200:]).double().mean().item()


@potluck.service("study")
class Study:
    """Optuna's study, on worker 0; the others call it. Tasks of the queue are trials to make."""

    def __init__(self):
        self.study = new_study()
        self.trials = {}

    def begin(self, call, task):
        """A trial for the task; if it was begun by a worker that is lost, with equal parameters."""
        lost = self.trials.get(task)
        if lost is not None:
            self.study.tell(lost, state=TrialState.FAIL, skip_if_finished=True)
            self.study.enqueue_trial(lost.params)
        trial = self.trials[task] = self.study.ask(SPACE)
        return {"trial": trial.number, "params": trial.params}

    def report(self, call, task, number, epoch, value):
        """Whether the trial should end, since others were better at this epoch."""
        trial = self.trials[task]
        if trial.number != number:
            return True  # the worker was taken for lost
        trial.report(value, epoch)
        return bool(trial.should_prune())

    def end(self, call, task, number, value, pruned):
        trial = self.trials[task]
        if trial.number == number:
            state = TrialState.PRUNED if pruned else TrialState.COMPLETE
            self.study.tell(trial, None if pruned else value, state=state, skip_if_finished=True)


def a_trial_a_worker(ctx, data, num_trials, epochs):
    """Workers take trials whenever they are free. Returns the study on worker 0."""
    own = Study() if ctx.is_master else None
    if own:
        ctx.serve(own)
    study = ctx.connect("study")
    tasks = [{}] * num_trials if ctx.is_master else None
    with potluck.WorkQueue(ctx, tasks, backups=0) as queue:
        for task in queue:
            begun = study.begin(task.number)
            model = new_model(begun["params"])
            optimizer = torch.optim.SGD(model.parameters(), lr=begun["params"]["rate"])
            for epoch in range(epochs):
                train_epoch(model, optimizer, data)
                value = accuracy(model, data)
                pruned = study.report(task.number, begun["trial"], epoch, value)
                if pruned:
                    break
            study.end(task.number, begun["trial"], value, pruned)
            queue.finish(task, value)
        queue.results()
    return own.study if own else None


def told(ctx, message):
    """What rank 0 passes, on all ranks."""
    line = torch.zeros(LINE, dtype=torch.uint8)
    if ctx.is_master:
        text = json.dumps(message).encode().ljust(LINE)
        line = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return json.loads(bytes(ctx.broadcast(line).tolist()))


def trials_on_all(ctx, data, num_trials, epochs):
    """Rank 0 asks, all are told and train together. All keep the history: any may be the next
    rank 0. Returns the study on rank 0."""
    history, study = [], None
    while True:
        try:
            message = {}
            if ctx.is_master:
                study = new_study(history)
                trial = study.ask(SPACE) if len(history) < num_trials else None
                params = trial and trial.params
                message = {"history": history, "params": params, "joins": ctx.has_next_group}
            message = told(ctx, message)
            history = message["history"]
            if message["joins"]:
                ctx.reform()  # a worker has come, or come back
                continue
            if message["params"] is None:
                return study
            inner = new_model(message["params"])
            model = pt.DDP(inner, ctx)
            optimizer = torch.optim.SGD(model.parameters(), lr=message["params"]["rate"])
            values, pruned = [], False
            while len(values) < epochs and not pruned:
                train_epoch(model, optimizer, data, ctx.rank, ctx.world_size)
                values.append(accuracy(model, data))
                if ctx.is_master:
                    trial.report(values[-1], len(values) - 1)
                pruned = told(ctx, ctx.is_master and bool(trial.should_prune()))
            history.append({"params": message["params"], "values": values, "pruned": pruned})
        except PeerLost as error:
            ctx.reform(error)
            if ctx.is_master:
                print(f"trial {len(history)} again: {error}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6, help="of a trial that is not pruned")
    parser.add_argument("--spans-workers", action="store_true", help="each trial on all workers")
    args = parser.parse_args()

    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    search = trials_on_all if args.spans_workers else a_trial_a_worker
    with potluck.init() as ctx:
        study = search(ctx, data, args.trials, args.epochs)
        if study is None:
            return
        for trial in study.trials:
            if trial.state.is_finished():
                values = ", ".join(f"{name} {value:.3g}" for name, value in trial.params.items())
                last = max(trial.intermediate_values.items(), default=(0, 0.0))[1]
                print(f"trial {trial.number} {trial.state.name}: {values}: accuracy {last:.3f}")
        print(f"best: trial {study.best_trial.number}, accuracy {study.best_value:.3f}")


if __name__ == "__main__":
    main()
