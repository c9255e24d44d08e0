"""Ranks whose models differ: every rank's error names the first difference, nothing is mixed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck import DistributedNeuralNetTrainer, TrainingStrategy
from potluck._core.context import DistributedContext
from potluck._core.context.structure import compare, hash_of
from potluck.errors import Desync
from potluck.testing.elastic import ElasticWorld
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, ElasticLoop, structure
from potluck.torch.structure import structure_of
from support.worlds import open_world

Make = Callable[[int], nn.Module]


def ordered(names: str) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.full((4,), float(ord(name)))))
    return model


def frozen(name: str) -> nn.Module:
    model = ordered("ab")
    model.get_parameter(name).requires_grad_(False)
    return model


def tied(is_tied: bool) -> nn.Module:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    if is_tied:
        layers[1].weight = layers[0].weight
    return nn.Sequential(*layers)


class Scaled(nn.Linear):
    def __init__(self, name: str) -> None:
        super().__init__(2, 2)
        self.register_buffer(name, torch.ones(2))


class Holding(nn.Linear):
    def __init__(self, odd: Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("odd", odd)


class Added(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))
        for each in self.parameters():
            nn.init.zeros_(each)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.a(x) + self.b(x)
        return total


with warnings.catch_warnings():  # torch calls these prototypes, or deprecated
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.quint8)
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)


def many(names: Sequence[str]) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


CASES: dict[str, tuple[Make, str]] = {
    "order": (
        lambda rank: ordered("ab" if rank == 0 else "ba"),
        r"first where rank 0 \(.*\) has 'a' \(float32 of shape \(4,\), requires_grad=True\) and "
        r"rank 1 \(.*\) has 'b' \(float32 of shape \(4,\), requires_grad=True\); give every rank",
    ),
    "frozen": (
        lambda rank: frozen("ab"[rank == 1]),
        r"rank 0 .* has 'a' \(.*requires_grad=False\) and rank 1 .* has 'a' \(.*True\)",
    ),
    "as many bytes": (
        lambda rank: nn.Linear(2, 2 if rank else 4).to(torch.float32 if rank else torch.bfloat16),
        r"rank 0 .* has 'weight' \(bfloat16 of shape \(4, 2\).* 'weight' \(float32 of shape \(2, 2",
    ),
    "halves": (
        lambda rank: nn.Linear(2, 2).to(torch.float16 if rank == 1 else torch.bfloat16),
        r"rank 0 .* has 'weight' \(bfloat16 .* and rank 1 .* has 'weight' \(float16",
    ),
    "buffer's name": (
        lambda rank: Scaled("scale" if rank == 0 else "shift"),
        r"rank 0 .* has 'scale' \(buffer, float32 of shape \(2,\)\) and rank 1 .* has 'shift'",
    ),
    "a layer more": (
        lambda rank: many(["body", "lora"] if rank == 1 else ["body"]),
        r"rank 0 .* has nothing more and rank 1 .* has 'lora.weight' \(float32",
    ),
    "a layer less": (
        lambda rank: many(["body"] if rank == 1 else ["body", "head"]),
        r"rank 0 .* has 'head.weight' .* and rank 1 .* has nothing more",
    ),
    "tied": (lambda rank: tied(rank == 1), r"rank 0 .* has '1.weight' .* rank 1 .* has '1.bias'"),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_constructor_raises_on_all_ranks_and_names_the_first_difference(
    case: str, world_size: int
) -> None:
    make, text = CASES[case]

    def rank(ctx: DistributedContext) -> tuple[str, list[Tensor]]:
        model = make(ctx.rank)
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(Desync) as caught:
            DDP(model, ctx)
        assert all(map(torch.equal, before, model.parameters())), "nothing is overwritten"
        assert ctx.all_reduce(np.ones(1))[0] == world_size, "the group goes on"
        return str(caught.value)

    with open_world("shm", world_size) as world:
        texts = world.run(rank)
    assert len(set(texts)) == 1
    assert re.search(text, texts[0]), texts[0]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (nn.ReLU, ValueError, "no parameter of the module requires a gradient"),
        (lambda: nn.Linear(2, 2, device="meta"), ValueError, "weight is on the meta device"),
        (lambda: nn.Embedding(3, 2, sparse=True), TypeError, "weight gets sparse gradients"),
        (lambda: nn.LazyLinear(3), ValueError, "uninitialized"),
        (lambda: Holding(QUANTIZED), TypeError, "odd: quantized tensors can't be communicated"),
        (lambda: Holding(NESTED), TypeError, "odd: nested tensors can't be communicated"),
    ],
)
def test_a_model_that_one_rank_refuses_is_constructed_on_none(
    make: Callable[[], nn.Module], error: type[Exception], text: str
) -> None:
    def rank(ctx: DistributedContext) -> None:
        mine = ctx.rank == 1
        with pytest.raises(error if mine else Desync, match=text) as caught:
            DDP(make() if mine else nn.Linear(2, 2), ctx)
        if not mine:
            assert caught.match("rank 1 .* refused the model")
        ctx.barrier()

    with open_world("shm", 3) as world:
        world.run(rank)


def reshaped(model: Scaled) -> None:
    """The same tensor, with as many elements in another shape."""
    model.scale.data = torch.ones(1, 2)


def of_another_dtype(model: Scaled) -> None:
    model.scale = model.scale.to(torch.int32)


def renamed(model: Scaled) -> None:
    model.register_buffer("shift", model.scale)
    del model.scale


@pytest.mark.parametrize("change", [reshaped, of_another_dtype, renamed])
def test_buffers_are_described_once_and_a_change_between_forwards_is_noticed(
    change: Callable[[Scaled], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []
    structure._hash_of.cache_clear()
    monkeypatch.setattr(
        structure, "hash_of", lambda items: described.append(len(items)) or hash_of(items)
    )

    def rank(ctx: DistributedContext) -> None:
        model = DDP(Scaled("scale"), ctx)
        for _ in range(5):
            model(torch.ones(1, 2))
        ctx.barrier()
        assert described.count(1) <= 2, "once, or by each thread"
        if ctx.rank == 1:
            change(model.module)
        model(torch.ones(1, 2))

    with pytest.raises(WorldError, match="since one of them was changed") as caught:
        run_world(2, rank)
    assert {type(error) for error in caught.value.errors.values()} == {Desync}


def test_in_an_elastic_group_the_first_forward_compares() -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(ordered("ab" if ctx.rank == 0 else "ba"), ctx)
        with pytest.raises(Desync, match=r"rank 0 .* has 'a' .*rank 1 .* has 'b'"):
            model(torch.ones(1))

    run_world(2, rank)


def test_a_loop_compares_before_it_trains_and_when_a_worker_joins() -> None:
    def train(ctx: DistributedContext, names: str) -> None:
        model = DDP(many(names), ctx)
        data = (torch.ones(4, 2), torch.ones(4, 2))
        job = ElasticLoop(
            model, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=2, epochs=1
        )
        for x, _ in job:
            with job.step():
                model.module["a"](x).sum().backward()

    with pytest.raises(WorldError) as caught:
        run_world(3, lambda ctx: train(ctx, "ab" if ctx.rank < 2 else "ba"))
    for error in caught.value.errors.values():
        assert isinstance(error, Desync)
        assert re.search(r"rank 0 .* has 'a.weight' .*rank 2 .* has 'b.weight'", str(error))


def test_a_worker_that_joins_with_another_model_is_named() -> None:
    joined: list[ElasticWorld[Any]] = []

    def train(ctx: DistributedContext) -> None:
        is_late = len(ctx.members) > 2
        model = DDP(many("ba" if is_late else "ab"), ctx)
        data = (torch.ones(400, 2), torch.ones(400, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        job = ElasticLoop(model, optimizer, data, batch_size=2)
        for x, _ in job:
            with job.step():
                if ctx.rank == 0 and job.step_number == 2:
                    joined[0].join()
                model.module["a"](x).sum().backward()

    world: ElasticWorld[Any] = ElasticWorld(2, train)
    joined.append(world)
    with pytest.raises(Desync, match=r"rank 0 .* has 'a.weight' .*rank 2 .* has 'b.weight'"):
        world.run()
    assert len(world.errors) == 3
    assert all(isinstance(error, Desync) for error in world.errors.values())


@pytest.mark.parametrize("strategy", list(TrainingStrategy))
def test_trainers_of_unlike_networks_name_the_first_difference(strategy: TrainingStrategy) -> None:
    def rank(ctx: DistributedContext) -> None:
        trainer = DistributedNeuralNetTrainer(
            ctx, strategy, input_dim=4, hidden_dims=[5 if ctx.rank else 3], output_dim=1
        )
        text = r"rank 0 .* has '0.weight' \(float32 of shape \(3, 4\).* has '0.weight' .*\(5, 4\)"
        with pytest.raises(Desync, match=text):
            trainer.train_epoch(np.ones((8, 4)) * ctx.rank, np.ones(8))

    run_world(2, rank)


@pytest.mark.parametrize(
    "strategy", [s for s in TrainingStrategy if s is not TrainingStrategy.MODEL_PARALLEL]
)
def test_trainers_of_layers_in_another_order_name_the_first_difference(
    strategy: TrainingStrategy,
) -> None:
    """All parameters are zeros: neither sizes nor values tell the two apart."""

    def rank(ctx: DistributedContext) -> None:
        model = Added("ba" if ctx.rank else "ab")
        trainer = DistributedNeuralNetTrainer(ctx, strategy, model=model)
        with pytest.raises(Desync, match=r"rank 0 .* has 'a.weight' .*rank 1 .* has 'b.weight'"):
            trainer.train_epoch(np.ones((8, 2)) * ctx.rank, np.ones((8, 2)))

    run_world(2, rank)


def test_buffers_that_change_on_one_rank_later_end_the_group_by_name() -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(Scaled("scale"), ctx)
        model(torch.ones(2, 2))
        model.module.scale = torch.full((2,), 7 + ctx.rank)  # another dtype, as many bytes
        if ctx.rank == 1:
            model.module.scale = model.module.scale.int().view(2, 1).repeat(1, 2)
        for _ in range(2):
            with pytest.raises(Desync, match=r"the buffers of rank 1 .*other names, dtypes"):
                model(torch.ones(2, 2))
                ctx.barrier()

    run_world(2, rank)


def test_equal_models_train_also_where_one_rank_compiles() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = nn.Sequential()
    compiled.add_module("_orig_mod", plain)  # the names that torch.compile gives
    names = set(dict(plain.named_parameters()))
    prefixed = {f"_orig_mod.{name}" for name in names}
    assert structure_of(plain, names) == structure_of(compiled, prefixed)


def test_the_hash_follows_order_names_and_texts() -> None:
    base = {"a": "x", "b": "y"}
    others = [{"b": "y", "a": "x"}, {"a": "x"}, {"a": "y", "b": "y"}, {"a": "x", "c": "y"}, {}]
    assert hash_of(base) == hash_of(dict(base))
    assert len({hash_of(each) for each in [base, *others]}) == 6
    assert max(hash_of(each) for each in others) < 2**48


def test_thousands_of_items_of_unlike_number() -> None:
    def rank(ctx: DistributedContext) -> str:
        items = {f"p{i}": "float32" for i in range(3000 + (ctx.rank == 1))}
        with pytest.raises(Desync) as caught:
            compare(ctx, "the model", items, "mend it")
        return str(caught.value)

    (first, second) = run_world(2, rank)
    assert first == second
    assert "rank 0 (worker 0) has nothing more and rank 1 (worker 1) has 'p3000' (float32)" in first
    assert first.endswith("; mend it")
