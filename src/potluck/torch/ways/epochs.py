"""An elastic loop whose steps are whole epochs, for ways in which ranks seldom agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from potluck.checkpoint.state import State
from potluck.torch.schedules import schedule_of
from potluck.torch.ways.samples import TrainerSamples
from potluck.torch.ways.way import Recipe
from potluck.training.elastic import ElasticLoop
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

WHOLE = 1 << 62
"""A batch size by which a step is a whole epoch."""


def epoch_loop(
    recipe: Recipe,
    samples: TrainerSamples,
    epochs: int,
    first: int,
    callbacks: Sequence[object],
    *,
    is_kept: Callable[[], bool] = lambda: False,
) -> ElasticLoop:
    """A loop of ``epochs`` steps, ``first`` after this trainer's earlier ones. Its state are the
    parameters and buffers of the network, which must be equal on all ranks at each commit. Those of
    a rank where ``is_kept()`` are not replaced by another's."""

    def capture() -> State:
        return dict(recipe.network.state_dict())

    def restore(state: Any) -> None:
        if not is_kept():
            recipe.network.load_state_dict(state)

    seed = recipe.seed + first
    schedule = schedule_of(samples.dataset, WHOLE, epochs, seed, True, recipe.samples)
    replica = StateReplica(capture, restore, str(recipe.device), describe=recipe.structure)
    return ElasticLoop(recipe.ctx, schedule, replica, callbacks=callbacks)


def part_of_epoch(schedule: Schedule, number: int, num_parts: int) -> tuple[int, int]:
    """The positions of the part ``number`` of ``num_parts`` of an epoch."""
    num = schedule.num_samples
    return num * number // num_parts, num * (number + 1) // num_parts
