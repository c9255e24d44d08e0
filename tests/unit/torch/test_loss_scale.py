"""The loss scale: doubled after enough good steps, halved by each overflow, never without end."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from potluck.torch.amp import LossScale


def test_it_grows_after_an_interval_without_overflow_and_shrinks_at_once() -> None:
    scale = LossScale(scale=8.0, interval=3)
    course = []
    for overflow in [False, False, False, False, True, False, False, False]:
        scale = scale.after(overflow)
        course.append(scale.scale)
    assert course == [8, 8, 16, 16, 8, 8, 8, 16]


def test_when_even_the_smallest_scale_overflows_it_is_the_loss() -> None:
    scale = LossScale(scale=4.0, minimum=1.0).after(True).after(True)
    with pytest.raises(FloatingPointError, match="loss is infinite or NaN"):
        scale.after(True)


@pytest.mark.parametrize("wrong", [{"scale": 0}, {"growth": 1}, {"backoff": 1}, {"interval": 0}])
def test_rules_must_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LossScale(**wrong)  # type: ignore[arg-type]
