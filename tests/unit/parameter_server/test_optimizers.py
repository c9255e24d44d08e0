"""The server's optimizers beside PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from potluck.parameter_server import SGD, Adam
from potluck.parameter_server.layout import checked, layout_of
from potluck.parameter_server.optimizers import Optimizer, State
from potluck.parameter_server.table import Table


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (
            SGD(0.1, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        ),
        (
            SGD(0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        ),
        (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
        (Adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ten_steps_are_those_of_torch(mine: Optimizer, theirs: object, dtype: str) -> None:
    chance = np.random.default_rng(0)
    start = chance.normal(size=(3, 4)).astype(dtype)
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = theirs([parameter])  # type: ignore[operator]
    table = Table({"w": start.copy()}, mine)
    for _ in range(10):
        gradient = chance.normal(size=(3, 4)).astype(dtype)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        table.step([{"w": gradient}], mine.learning_rate)
    assert table.tensors["w"].dtype == dtype
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(table.tensors["w"], parameter.detach().numpy(), rtol=tolerance)


def test_a_step_changes_neither_the_parameters_nor_the_state_before() -> None:
    parameter, gradient = np.ones(2), np.ones(2)
    state: State = {"mean": np.ones(2), "square": np.ones(2)}
    Adam().step(parameter, gradient, state, 2, 0.1)
    SGD(0.1, momentum=0.9).step(parameter, gradient, {"velocity": gradient}, 2, 0.1)
    for array in (parameter, gradient, *state.values()):
        assert array.tolist() == [1.0, 1.0]


def test_a_gradient_that_the_parameters_dtype_can_not_hold_is_refused() -> None:
    layout = layout_of({"w": np.zeros(1, np.float16)})
    with pytest.raises(ValueError, match=r"NaN or infinite numbers in 'w' \(float16\)"):
        checked({"w": np.array([1e6])}, layout, "w", "the gradient")


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_torchs_word_for_the_learning_rate_is_answered_by_potlucks(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no argument 'lr'; write learning_ra"):
        kind(lr=0.1)
