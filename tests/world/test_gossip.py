"""Gossip in the elastic loop: the mathematics, losses, joins, checkpoints."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from potluck import graphs
from potluck._core.context import DistributedContext
from potluck.errors import CheckpointError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, DataParallel, ElasticLoop, Gossip, LocalSGD, Policy

GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(80, 5, generator=GENERATOR, dtype=torch.float64)
Y = X @ torch.arange(1.0, 6.0, dtype=torch.float64)
START = nn.Linear(5, 1, bias=False).double()
LR = 0.05


class Training:
    """A linear regression, of which every round's batches and parameters are kept."""

    def __init__(
        self,
        ctx: DistributedContext,
        strategy: Any,
        *,
        act: Callable[[Training], None] = lambda training: None,
        **options: Any,
    ) -> None:
        self.ctx, self.act = ctx, act
        self.model = DDP(copy.deepcopy(START), ctx)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.job = ElasticLoop(
            self.model, self.optimizer, (X, Y), batch_size=8, seed=2, strategy=strategy,
            epochs=options.pop("epochs", 1), policy=Policy(hash_every=1, save_every=4),
            callbacks=[self], **options,
        )  # fmt: skip
        self.batches: list[tuple[np.ndarray, np.ndarray]] = []
        self.weights: list[np.ndarray] = []

    def on_step_end(self, step: int, loss: float) -> None:
        self.weights.append(self.weight())

    def weight(self) -> np.ndarray:
        (parameter,) = self.model.parameters()
        return parameter.detach().numpy()[0].copy()

    def run(self) -> Training:
        for x, y in self.job:
            with self.job.step():
                self.act(self)
                self.optimizer.zero_grad()
                loss = ((self.model(x)[:, 0] - y) ** 2).mean()
                loss.backward()
                self.job.log(loss=loss)
                self.optimizer.step()
                self.batches.append((x.numpy(), y.numpy()))
        return self


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("graph", "sequence"),
    [
        ("exponential", [graphs.exponential(4)]),
        ("base", graphs.base(4)),
        (nx.cycle_graph(4).to_directed(), [graphs.ring(4)]),
        (lambda world_size: graphs.base(world_size, 2), graphs.base(4, 2)),
    ],
    ids=["exponential", "base", "DiGraph", "function"],
)
def test_gossip_is_dpsgd_in_numpy(graph: Any, sequence: Any, every: int) -> None:
    found = run_world(4, lambda ctx: Training(ctx, Gossip(graph, every=every)).run())
    now = np.stack([START.weight.detach().numpy()[0]] * 4)
    for number in range(10 // every):
        for rank, training in enumerate(found):
            for x, y in training.batches[number * every : (number + 1) * every]:
                now[rank] -= LR * 2 * x.T @ (x @ now[rank] - y) / len(y)
        now = sequence[number % len(sequence)].matrix() @ now
        for rank, training in enumerate(found):
            # A weight near 0 has the rounding of its terms, of about 1.
            np.testing.assert_allclose(training.weights[number], now[rank], rtol=1e-12, atol=1e-15)
    for training in found:
        assert len(training.batches) == 10
        np.testing.assert_allclose(training.weight(), now.mean(axis=0), rtol=1e-12)
    assert len({training.job.parameter_hash() for training in found}) == 1


def test_over_a_complete_graph_gossip_is_local_sgd() -> None:
    complete = nx.complete_graph(4).to_directed()
    found = run_world(4, lambda ctx: Training(ctx, Gossip(complete, every=2)).run())
    wanted = run_world(4, lambda ctx: Training(ctx, LocalSGD(every=2)).run())
    for mine, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.weight(), right.weight(), rtol=1e-12)
    alone = run_world(1, lambda ctx: Training(ctx, Gossip()).run())
    plain = run_world(1, lambda ctx: Training(ctx, DataParallel()).run())
    np.testing.assert_allclose(alone[0].weight(), plain[0].weight(), rtol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_on_a_rank_is_counted_and_leaves_the_means_of_others(bad: float) -> None:
    def act(training: Training) -> None:
        if training.ctx.rank == 1 and len(training.batches) == 3:
            with torch.no_grad():
                training.model.module.weight[0, 2] = bad

    found = run_world(4, lambda ctx: Training(ctx, Gossip("ring"), act=act, epochs=12).run())
    for training in found:
        assert np.isfinite(training.weights).all()
        np.testing.assert_allclose(training.weight(), np.arange(1.0, 6.0), atol=0.05)
    now = np.stack([training.weights[2] for training in found])
    for rank, training in enumerate(found):
        x, y = training.batches[3]
        now[rank] -= LR * 2 * x.T @ (x @ now[rank] - y) / len(y)
    shares = graphs.ring(4).matrix()
    shares[:, 1] = 0  # of rank 1 all elements are lost: so is its gradient
    wanted = shares @ now / shares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([each.weights[3] for each in found], wanted, rtol=1e-12)
    counts = [training.job.num_nonfinite for training in found]
    assert [count["weight"] > 0 for count in counts] == [False, True, False, False]


def test_a_rank_without_finite_neighbours_ends_with_nan_on_all() -> None:
    def act(training: Training) -> None:
        with torch.no_grad():
            training.model.module.weight[0, 2] = float("nan")

    found = run_world(2, lambda ctx: Training(ctx, Gossip("ring"), act=act).run())
    for training in found:
        assert np.isnan(training.weight()).all()  # defined, and equal: no Diverged


def test_ranks_differ_between_rounds_and_learn_the_same_in_the_end() -> None:
    found = run_world(4, lambda ctx: Training(ctx, Gossip("ring"), epochs=12).run())
    first = {training.weights[0].tobytes() for training in found}
    assert len(first) == 4
    for training in found:
        np.testing.assert_allclose(training.weight(), np.arange(1.0, 6.0), atol=0.05)


@pytest.mark.parametrize("moment", [1, 4, 7])
@pytest.mark.parametrize("graph", ["exponential", "base", nx.cycle_graph(4).to_directed()], ids=str)
def test_the_survivors_go_on_over_a_graph_of_their_number(graph: Any, moment: int) -> None:
    def work(ctx: MortalContext) -> Training:
        def act(training: Training) -> None:
            if ctx.backend.worker == "2" and len(training.batches) == moment:
                ctx.die()

        return Training(ctx, Gossip(graph, every=2), epochs=6, act=act).run()

    results = ElasticWorld(4, work).run()
    assert len(results) == 3
    hashes = set()
    for training in results.values():
        assert training.job.done
        assert training.job.committed == 6 * len(X)
        hashes.add(training.job.parameter_hash())
        np.testing.assert_allclose(training.weight(), np.arange(1.0, 6.0), atol=0.3)
    assert len(hashes) == 1


@pytest.mark.parametrize("moment", range(3, 40, 4))
def test_a_death_anywhere_leaves_the_survivors_equal(moment: int) -> None:
    """Also in the averaging with neighbours, in the vote, and in the mean at the end."""
    results = ElasticWorld(
        3,
        lambda ctx: Training(ctx, Gossip("base", every=2), epochs=2).run(),
        dies=lambda worker, name, number: worker == "2" and number == moment,
    ).run()
    assert {"0", "1"} <= results.keys()
    assert len({training.job.parameter_hash() for training in results.values()}) == 1
    assert all(training.job.committed == 2 * len(X) for training in results.values())


def test_a_newcomer_begins_with_the_parameters_of_a_member() -> None:
    joined = threading.Event()
    begun: list[np.ndarray] = []

    def work(ctx: MortalContext) -> Training:
        def act(training: Training) -> None:
            if ctx.backend.worker == "0" and len(training.batches) == 5 and not joined.is_set():
                joined.set()
                world.join()
            if ctx.backend.worker == "3" and not training.batches:
                begun.append(training.weight())

        return Training(ctx, Gossip("base"), epochs=4, act=act).run()

    world: ElasticWorld[Training] = ElasticWorld(3, work)
    results = world.run()
    assert len(results) == 4
    assert results["3"].batches
    aim = np.arange(1.0, 6.0)
    start = START.weight.detach().numpy()[0]
    assert np.linalg.norm(begun[0] - aim) < 0.9 * np.linalg.norm(start - aim)
    assert len({training.job.parameter_hash() for training in results.values()}) == 1
    for training in results.values():
        assert training.job.committed == 4 * len(X)


def test_a_checkpoint_has_the_mean_and_any_world_resumes_from_it(tmp_path: Path) -> None:
    """What a rank ends with before the checkpoint is the mean, on every rank."""

    def first(ctx: DistributedContext) -> Training:
        def act(training: Training) -> None:
            if len(training.batches) == 6:
                raise RuntimeError("the power fails")

        training = Training(ctx, Gossip("ring"), act=act, checkpoint=tmp_path, epochs=2)
        trainings[ctx.rank] = training
        return training.run()

    trainings: dict[int, Training] = {}
    with pytest.raises(WorldError, match="the power fails"):
        run_world(4, first)
    before = [trainings[rank].weights[3] for rank in range(4)]
    assert len({each.tobytes() for each in before}) == 4
    begun: dict[int, np.ndarray] = {}

    def second(ctx: DistributedContext) -> Training:
        def act(training: Training) -> None:
            begun.setdefault(ctx.rank, training.weight())

        options = {"checkpoint": tmp_path, "epochs": 2}
        return Training(ctx, Gossip("base"), act=act, **options).run()

    for training in run_world(3, second):
        assert len(training.batches) == 20 - 4
    for rank in range(3):
        np.testing.assert_allclose(begun[rank], np.mean(before, axis=0), rtol=1e-12)
    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: Training(ctx, LocalSGD(every=1), checkpoint=tmp_path).run())
    assert any(isinstance(error, CheckpointError) for error in caught.value.errors.values())


def test_digits_are_learned_as_with_all_reduce() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, digits = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    train, test = order[:1437], order[1437:]
    start = nn.Sequential(nn.Linear(64, 10))
    nn.init.zeros_(start[0].weight)
    nn.init.zeros_(start[0].bias)

    def work(ctx: DistributedContext, strategy: Any) -> float:
        model = DDP(copy.deepcopy(start), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        job = ElasticLoop(
            model, optimizer, (x[train], y[train]), batch_size=128, epochs=6, strategy=strategy
        )
        for inputs, labels in job:
            with job.step():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                job.log(loss=loss)
                optimizer.step()
        with torch.no_grad():
            return (model(x[test]).argmax(1) == y[test]).float().mean().item()

    (wanted, *_), *found = (
        run_world(4, lambda ctx, each=each: work(ctx, each))
        for each in (DataParallel(), Gossip("base"), Gossip("ring", every=2))
    )
    assert wanted > 0.9
    for accuracies in found:
        assert len(set(accuracies)) == 1
        assert accuracies[0] >= wanted - 0.02


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Gossip("star"), "the graphs with a name are base, exponential, ring"),
        (lambda: Gossip([]), "empty sequence"),
        (lambda: Gossip(every=0), "at least 1 step"),
        (lambda: Gossip(nx.DiGraph([(0, 1), (0, 2), (1, 2)])), "mean of the parameters would"),
        (lambda: Gossip(nx.DiGraph([(0, 1), (1, 0), (2, 3), (3, 2)])), "falls into parts"),
        (lambda: Gossip(lambda size: graphs.ring(size + 1)).graphs(3), "4 nodes, and 3 are wanted"),
    ],
)
def test_graphs_that_teach_nothing_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
