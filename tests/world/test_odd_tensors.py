"""Tensors whose meaning is not in their elements: every call refuses them by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from potluck._core.context import DistributedContext
from potluck.checkpoint.state import encode
from support.process_groups import process_group
from support.worlds import open_world

Call = Callable[[Tensor], Any]


def quiet(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``make`` without warnings: torch calls these prototypes, or deprecated."""

    def made() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def nested(layout: torch.layout) -> Callable[[], Tensor]:
    return quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "quantized": (
        quiet(lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.quint8)),
        "quantized tensors .*scale would be lost.*dequantize",
    ),
    "nested": (nested(torch.strided), "nested tensors .*unbind"),
    "jagged": (nested(torch.jagged), "NestedTensor .*unbind"),
    "fake": (fake, "FakeTensor .*has no data"),
    "masked": (
        quiet(lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True]))),
        "MaskedTensor .*mask would be lost",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device and has no data.*empty_like"),
}


def calls_of(ctx: DistributedContext) -> dict[str, Call]:
    return {
        "all_reduce": ctx.all_reduce,
        "broadcast": ctx.broadcast,
        "all_gather": ctx.all_gather,
        "all_gather_uneven": ctx.all_gather_uneven,
        "send": lambda t: ctx.send(t, 1 - ctx.rank),
        "recv": lambda t: ctx.recv(t, 1 - ctx.rank),
        "send_message": lambda t: ctx.send_message({"t": t}, 1 - ctx.rank),
        "residual": lambda t: ctx.all_reduce(torch.ones(3), codec="int8", residual=t),
        "out": lambda t: ctx.all_gather(torch.ones(3), out=t),
    }


@pytest.mark.parametrize("kind", ["inproc", "shm"])
@pytest.mark.parametrize("odd", ODD)
def test_a_context_refuses_it_by_name_and_goes_on(odd: str, kind: str) -> None:
    make, text = ODD[odd]
    tensor = make()

    def rank(ctx: DistributedContext) -> None:
        for call in calls_of(ctx).values():
            with pytest.raises((TypeError, ValueError), match=text):
                call(tensor)
        assert ctx.all_reduce(torch.ones(3)).tolist() == [2.0] * 3

    with open_world(kind, 2) as world:
        world.run(rank)


@pytest.mark.parametrize("odd", ODD)
def test_a_process_group_refuses_it_by_name_and_goes_on(odd: str) -> None:
    make, text = ODD[odd]
    tensor = make()

    def rank(ctx: DistributedContext) -> None:
        with process_group(ctx) as group:
            calls: list[Call] = [
                lambda t: group.allreduce([t]),
                lambda t: group.broadcast([t]),
                lambda t: group.allgather([[torch.ones(3)] * 2], [t]),
                lambda t: group.all_gather_single(torch.ones(6), t),
                lambda t: group.send([t], 1 - ctx.rank, 0),
                lambda t: group.recv([t], 1 - ctx.rank, 0),
                lambda t: group.reduce([t]),
            ]
            for call in calls:
                with pytest.raises((TypeError, ValueError), match=text):
                    call(tensor)
            group.barrier().wait()

    with open_world("shm", 2) as world:
        world.run(rank)


def test_inside_of_vmap_and_grad() -> None:
    def rank(ctx: DistributedContext) -> None:
        for transform in (torch.func.vmap, torch.func.grad):
            with pytest.raises(TypeError, match=r"outside of the function that torch.func"):
                transform(lambda x: ctx.all_reduce(x).sum())(torch.ones(3))
        ctx.barrier()

    with open_world("shm", 2) as world:
        world.run(rank)


@pytest.mark.parametrize("odd", [name for name in ODD if name != "jagged"])
def test_a_state_refuses_it(odd: str) -> None:
    make, _ = ODD[odd]
    with pytest.raises((TypeError, ValueError)):
        encode({"w": make()})


def test_conjugate_and_negative_views_and_subclasses_with_memory_are_taken() -> None:
    class Named(Tensor):
        pass

    def rank(ctx: DistributedContext) -> None:
        x = torch.tensor([1 + 2j, 3 - 1j])
        assert ctx.all_gather(x.conj())[1].tolist() == [1 - 2j, 3 + 1j]
        assert ctx.all_gather(x.conj().imag)[0].tolist() == [-2.0, 1.0]
        named = torch.ones(2).as_subclass(Named)
        assert ctx.all_reduce(named).tolist() == [2.0, 2.0]
        assert ctx.all_reduce(torch.nn.Parameter(torch.ones(2))).tolist() == [2.0, 2.0]

    with open_world("shm", 2) as world:
        world.run(rank)
