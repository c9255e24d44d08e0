"""Gradients over ranks equal the gradient of one process over the whole batch."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.context import DistributedContext
from potluck.errors import Desync, PeerLost
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP, DistributedDataParallel, ElasticLoop
from potluck.torch.trainer import DistributedNeuralNetTrainer
from potluck.training.sampler import shares
from support.worlds import open_world

WORLDS = [1, 2, 3, 4]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.to(dtype)


def make_batch(size: int = 13, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(size, 6, generator=generator).to(dtype),
        torch.randn(size, 3, generator=generator).to(dtype),
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).pow(2).mean()


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def alone(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor | None]:
    loss_of(model, x, y).backward()
    return grads(model)


def my_part(ctx: DistributedContext, *tensors: Tensor) -> tuple[list[Tensor], float]:
    """This rank's slice of each tensor, and its weight."""
    size = len(tensors[0])
    start, stop = shares(size, ctx.world_size)[ctx.rank]
    return [tensor[start:stop] for tensor in tensors], (stop - start) / size


def assert_same(results: list[list[Tensor | None]], expected: list[Tensor | None]) -> None:
    for result in results:
        for mine, first, right in zip(result, results[0], expected, strict=True):
            if right is None:
                assert mine is None
                continue
            assert mine is not None
            assert first is not None
            assert torch.equal(mine, first), "ranks must agree bit by bit"
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("bucket_size_mb", [25, 1e-5, 1e-3])
def test_uneven_shares_give_the_gradient_of_the_whole_batch(
    world_size: int, bucket_size_mb: float
) -> None:
    x, y = make_batch()

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DDP(make_model(), ctx, bucket_size_mb=bucket_size_mb)
        (mine_x, mine_y), model.weight = my_part(ctx, x, y)
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    assert_same(run_world(world_size, rank), alone(make_model(), x, y))


def test_without_weights_ranks_count_equally() -> None:
    x, y = make_batch(12)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DistributedDataParallel(make_model(), ctx)
        (mine_x, mine_y), _ = my_part(ctx, x, y)
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    assert_same(run_world(3, rank), alone(make_model(), x, y))


def test_a_rank_of_weight_zero_adds_exact_zeros_even_where_its_gradients_are_nan() -> None:
    x, y = make_batch(2)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DDP(make_model(), ctx)
        if ctx.rank < 2:
            model.weight = 0.5
            loss_of(model, x[ctx.rank : ctx.rank + 1], y[ctx.rank : ctx.rank + 1]).backward()
        else:
            model.weight = 0.0
            (loss_of(model, x[:1], y[:1]) * float("nan")).backward()
        return grads(model)

    assert_same(run_world(3, rank), alone(make_model(), x, y))


def test_accumulation_under_no_sync_sends_the_sum_once() -> None:
    x, y = make_batch(12)
    expected = alone(make_model(), x, y)

    def rank(ctx: DistributedContext) -> tuple[list[Tensor | None], int, int]:
        model = DDP(make_model(), ctx)
        (mine_x, mine_y), _ = my_part(ctx, x, y)
        model(mine_x)  # the first forward synchronizes
        before = operations(ctx)
        with model.no_sync():
            (loss_of(model, mine_x[:2], mine_y[:2]) / 2).backward()
        between = operations(ctx)
        (loss_of(model, mine_x[2:], mine_y[2:]) / 2).backward()
        return grads(model), between - before, operations(ctx) - between

    results = run_world(3, rank)
    assert_same([result[0] for result in results], expected)
    assert [result[1:] for result in results] == [(0, 1)] * 3


def operations(ctx: DistributedContext) -> int:
    """How many all_reduce this rank has ended."""
    found = ctx.stats()["operations"].get("all_reduce", {"count": 0})
    return int(found["count"])


class Branches(nn.Module):
    """``left`` or ``right``, and an ``orphan`` that nobody ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.orphan = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, use_right: bool) -> Tensor:
        return self.right(x) if use_right else self.left(x)


def test_parameters_used_by_some_ranks_only_are_averaged_and_orphans_keep_none() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)

    def make() -> Branches:
        torch.manual_seed(0)
        return Branches().double()

    def objective(model: nn.Module, rank: int) -> Tensor:
        return model(x[2 * rank : 2 * rank + 2], rank == 2).sum() / 6

    whole = make()
    sum(objective(whole, rank) for rank in range(3)).backward()
    seeded = threading.Lock()

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        with seeded:
            inner = make()
        model = DDP(inner, ctx)
        (3 * objective(model, ctx.rank)).backward()
        return grads(model)

    results = run_world(3, rank)
    assert results[0][4] is None
    assert_same(results, grads(whole))


def test_a_parameter_used_only_under_no_sync_is_sent_too() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    whole = Branches().double()
    start = copy.deepcopy(whole.state_dict())
    (whole(x, False).sum() + whole(x, True).sum()).backward()

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        inner = Branches().double()
        inner.load_state_dict(start)
        model = DDP(inner, ctx)
        part = x[ctx.rank : ctx.rank + 1]
        with model.no_sync():
            (2 * model(part, False).sum()).backward()
        (2 * model(part, True).sum()).backward()
        return grads(model)

    assert_same(run_world(2, rank), grads(whole))


def test_gradients_left_from_before_are_added_to_as_in_one_process() -> None:
    x, y = make_batch(8)
    whole = make_model()
    for _ in range(3):
        expected = alone(whole, x, y)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DDP(make_model(), ctx)
        (mine_x, mine_y), _ = my_part(ctx, x, y)
        for _ in range(3):
            loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    assert_same(run_world(2, rank), expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_shared_parameters_are_counted_once() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    whole = Tied().double()
    start = copy.deepcopy(whole.state_dict())
    whole(x).pow(2).mean().backward()

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        inner = Tied().double()
        inner.load_state_dict(start)
        model = DDP(inner, ctx, bucket_size_mb=1e-5)
        (part,), model.weight = my_part(ctx, x)
        model(part).pow(2).mean().backward()
        return grads(model)

    assert_same(run_world(3, rank), grads(whole))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
)
def test_other_float_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    x, y = make_batch(12, dtype)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DDP(make_model(dtype), ctx)
        (mine_x, mine_y), model.weight = my_part(ctx, x, y)
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    for result in run_world(3, rank):
        for mine, right in zip(result, alone(make_model(dtype), x, y), strict=True):
            assert mine is not None
            assert mine.dtype == dtype
            torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)


def test_gradients_of_another_device_go_through_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No accelerator is needed to see that what is staged arrives: host copies are forced."""

    def apart(self: Any, bucket: Any, like: Tensor) -> None:
        self.device = torch.zeros(bucket.length, dtype=like.dtype, device=like.device)
        self.host = torch.empty_like(self.device, device="cpu")

    monkeypatch.setattr("potluck.torch.reducer._Flat.__init__", apart)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = make_batch()

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DDP(make_model().to(device), ctx, bucket_size_mb=1e-3)
        (mine_x, mine_y), model.weight = my_part(ctx, x.to(device), y.to(device))
        loss_of(model, mine_x, mine_y).backward()
        return [None if g is None else g.cpu() for g in grads(model)]

    assert_same(run_world(2, rank), alone(make_model(), x, y))


def test_a_model_of_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 4).double(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x).float())

    x, y = make_batch(12)
    whole = Mixed()
    start = copy.deepcopy(whole.state_dict())
    expected = alone(whole, x, y.float())

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        inner = Mixed()
        inner.load_state_dict(start)
        model = DDP(inner, ctx)
        (mine_x, mine_y), model.weight = my_part(ctx, x, y.float())
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    for result in run_world(3, rank):
        for mine, right in zip(result, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_left_alone() -> None:
    def rank(ctx: DistributedContext) -> bool:
        inner = make_model()
        inner[0].requires_grad_(False)
        model = DDP(inner, ctx)
        loss_of(model, *make_batch()).backward()
        return inner[0].weight.grad is None and inner[2].weight.grad is not None

    assert run_world(2, rank) == [True, True]


class Counting(nn.Module):
    """Buffers of several dtypes that every forward in training mode changes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flag", torch.tensor([rank == 0, rank != 0]))
        self.register_buffer("small", torch.tensor([rank], dtype=torch.int16))
        self.register_buffer("wave", torch.tensor([rank + 1j]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def test_ranks_start_with_the_parameters_and_buffers_of_rank_zero() -> None:
    firsts: dict[int, dict[str, Tensor]] = {}

    def rank(ctx: DistributedContext) -> dict[str, Tensor]:
        inner = Counting(ctx.rank)
        firsts[ctx.rank] = copy.deepcopy(inner.state_dict())
        model = DDP(inner, ctx)
        model.synchronize()
        return dict(model.state_dict())

    for state in run_world(3, rank):
        assert state.keys() == firsts[0].keys()
        for name, value in state.items():
            assert value.dtype == firsts[0][name].dtype
            assert torch.equal(value, firsts[0][name]), name


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_follow_rank_zero_before_each_forward_in_training_mode(broadcast: bool) -> None:
    def rank(ctx: DistributedContext) -> list[Tensor]:
        torch_generator = torch.Generator().manual_seed(ctx.rank)
        model = DDP(Counting(ctx.rank), ctx, broadcast_buffers=broadcast)
        seen = []
        model.module.linear.register_forward_hook(
            lambda *_: seen.append(model.module.norm.running_mean.clone())
        )
        for _ in range(3):
            model(torch.randn(8, 2, generator=torch_generator)).sum().backward()
        return seen

    first, second = run_world(2, rank)
    assert torch.equal(first[1], second[1]) == broadcast
    assert torch.equal(first[2], second[2]) == broadcast


def test_in_evaluation_mode_one_rank_may_run_forward_alone() -> None:
    def rank(ctx: DistributedContext) -> float:
        model = DDP(Counting(ctx.rank), ctx)
        model.synchronize()
        model.eval()
        if ctx.rank == 0:
            model(torch.ones(2, 2))
        return float(ctx.all_reduce(torch.ones(1)))

    assert run_world(2, rank) == [2.0, 2.0]


def test_a_state_has_the_names_of_the_wrapped_module_and_loads_torchs_too() -> None:
    def rank(ctx: DistributedContext) -> None:
        model = DDP(make_model(), ctx)
        plain = make_model().state_dict()
        assert list(model.state_dict()) == list(plain)
        model.load_state_dict(plain)
        doubled = {f"module.{name}": value * 2 for name, value in plain.items()}
        model.load_state_dict(doubled)
        assert torch.equal(model.state_dict()["0.weight"], plain["0.weight"] * 2)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"module.0.weight": plain["0.weight"]})

    run_world(1, rank)


@pytest.mark.parametrize("training", [True, False])
def test_after_a_lost_peer_the_same_module_works_in_the_next_group(training: bool) -> None:
    """In training mode the loss may show in forward already, where buffers are broadcast."""
    x, y = make_batch(12)

    def make() -> nn.Module:
        return nn.Sequential(make_model(), nn.BatchNorm1d(3, affine=False).double())

    backends = InProcessBackend.world(3)
    ready = threading.Barrier(3)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        model = DDP(make(), ctx, bucket_size_mb=1e-4)
        model(x)
        ready.wait(10)
        if ctx.rank == 2:
            backends[2].hub.kill("2")
            return []
        model.train(training)
        with pytest.raises(PeerLost) as caught:
            loss_of(model, x, y).backward()
        ctx.reform(caught.value)
        model.zero_grad()
        model.module[1].reset_running_stats()
        model.eval()
        (mine_x, mine_y), model.weight = my_part(ctx, x, y)
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    results = run_world(3, rank, backends=backends)[:2]
    assert_same(results, alone(make().eval(), x, y))


def test_a_lost_peer_leaves_local_gradients_and_its_own_error() -> None:
    x, y = make_batch(12)
    backends = InProcessBackend.world(2)
    ready = threading.Barrier(2)

    def rank(ctx: DistributedContext) -> None:
        model = DDP(make_model(), ctx, bucket_size_mb=1e-4)
        model.synchronize()
        ready.wait(10)
        if ctx.rank == 1:
            backends[0].hub.kill("1")
            return
        loss = loss_of(model, x, y)
        with pytest.raises(PeerLost, match="rank 1"):
            loss.backward()
        local = make_model()
        for mine, right in zip(grads(model), alone(local, x, y), strict=True):
            # Autograd stops at the first hook that raises: what is there is this rank's own.
            assert mine is None or torch.equal(mine, right)

    run_world(2, rank, backends=backends)


def test_a_backward_that_raised_leaves_nothing_behind() -> None:
    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("a bug in a script")

    x, y = make_batch(12)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        inner = make_model()
        # One bucket: it never fills, so nothing was sent when the middle of backward raises.
        model = DDP(inner, ctx)
        model.synchronize()
        hidden = Faulty.apply(inner[0](x))
        with pytest.raises(ZeroDivisionError, match="a bug in a script"):
            inner[4](inner[3](inner[2](hidden))).sum().backward()
        model.zero_grad()
        (mine_x, mine_y), model.weight = my_part(ctx, x, y)
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    assert_same(run_world(2, rank), alone(make_model(), x, y))


def test_ranks_with_different_models_get_a_desync() -> None:
    def rank(ctx: DistributedContext) -> None:
        DDP(nn.Linear(2, 2 + ctx.rank), ctx).synchronize()

    with pytest.raises(WorldError) as caught:
        run_world(2, rank)
    assert all(isinstance(error, Desync) for error in caught.value.errors.values())


def test_activation_checkpointing_works_without_reentry_and_says_so_with_it() -> None:
    x, y = make_batch(12)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        inner = make_model()
        model = DDP(inner, ctx, bucket_size_mb=1e-5)
        model.synchronize()
        (mine_x, mine_y), model.weight = my_part(ctx, x, y)

        def run(reentrant: bool) -> Tensor:
            # The head comes first in backward; the rest is inside a checkpoint.
            body = checkpoint(inner[:4], mine_x.clone().requires_grad_(), use_reentrant=reentrant)
            return (inner[4](body) - mine_y).pow(2).mean()

        run(False).backward()
        found = grads(model)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            run(True).backward()
        return found

    assert_same(run_world(2, rank), alone(make_model(), x, y))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (nn.ReLU, ValueError, "no parameter"),
        (lambda: nn.ParameterDict({"w": torch.ones(2) * 1j}), TypeError, "w is torch.complex64"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(
    make: Callable[[], nn.Module], error: type[Exception], text: str
) -> None:
    def rank(ctx: DistributedContext) -> None:
        with pytest.raises(error, match=text):
            DDP(make(), ctx)

    run_world(1, rank)


def test_sparse_gradients_are_refused_by_name() -> None:
    def rank(ctx: DistributedContext) -> None:
        with pytest.raises(TypeError, match=r"weight gets sparse gradients.*sparse=False"):
            DDP(nn.Embedding(4, 2, sparse=True), ctx)
        model = DDP(nn.Embedding(4, 2), ctx)
        model.synchronize()
        with pytest.raises(TypeError, match=r"'weight' has a gradient of layout torch.sparse_coo"):
            F.embedding(torch.tensor([1]), model.module.weight, sparse=True).sum().backward()

    run_world(2, rank)


def test_a_discarded_wrapper_no_longer_communicates() -> None:
    x, y = make_batch(12)

    def rank(ctx: DistributedContext) -> list[Tensor | None]:
        inner = make_model()
        first = DDP(inner, ctx)
        first.synchronize()
        discarded = weakref.ref(first)
        del first
        while discarded() is not None:
            gc.collect()  # does nothing while another thread collects
        model = DDP(inner, ctx)
        (mine_x, mine_y), model.weight = my_part(ctx, x, y)
        loss_of(model, mine_x, mine_y).backward()
        return grads(model)

    assert_same(run_world(2, rank), alone(make_model(), x, y))


def test_a_subgroup_trains_its_own_model_and_loops_say_why_they_do_not() -> None:
    x, y = make_batch(12)

    def rank(ctx: DistributedContext) -> tuple[list[Tensor | None], list[Tensor | None]]:
        groups = [ctx.new_group([0, 1]), ctx.new_group([3, 2])]
        (mine,) = [each for each in groups if each is not None]
        model = DDP(make_model(), mine)
        half = slice(0, 6) if ctx.rank < 2 else slice(6, 12)
        (mine_x, mine_y), model.weight = my_part(mine, x[half], y[half])
        for _ in range(2):
            model.zero_grad()
            loss_of(model, mine_x, mine_y).backward()
        with pytest.raises(TypeError, match="an elastic loop needs the context itself, not a sub-"):
            ElasticLoop(model, torch.optim.SGD(model.parameters()), (x, y), batch_size=4)
        with pytest.raises(TypeError, match="DistributedNeuralNetTrainer needs the context itself"):
            DistributedNeuralNetTrainer(mine, input_dim=2, hidden_dims=[3], output_dim=1)
        with pytest.raises(Desync, match=r"rank 0 .* has 'weight' .* and rank 1 .* has 'weight'"):
            DDP(nn.Linear(2, 2 + mine.rank), mine)
        return grads(model), alone(make_model(), x[half], y[half])

    with open_world("shm", 4) as world:
        results = world.run(rank)
    for pair in (results[:2], results[2:]):
        assert_same([found for found, _ in pair], pair[0][1])
