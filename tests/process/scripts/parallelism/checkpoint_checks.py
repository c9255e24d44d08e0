"""torch.distributed.checkpoint: saved on four ranks, loaded on two, and back within one job."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import adam, alone, batches, check, close, mlp, same_parameters, whole
from harness import together as train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def sharded(seed: int):
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += seed
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    return model, adam(model)


@check(4)
def a_checkpoint_is_saved(run):
    model, optimizer = sharded(0)
    train(run, model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=run.folder / "saved")
    same_parameters(model, alone(mlp()))


@check(2)
def a_checkpoint_of_four_ranks_is_loaded_on_two(run):
    model, optimizer = sharded(7)  # other parameters, all of which must be replaced
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=run.folder / "saved")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    once = alone(mlp())
    same_parameters(model, once)
    # The optimizer's moments came along: training goes on as if it had never stopped.
    train(run, model, optimizer)
    twice = mlp()
    reference = adam(twice)
    for x, y in [*batches(), *batches()]:
        reference.zero_grad()
        F.cross_entropy(twice(x), y).backward()
        reference.step()
    same_parameters(model, twice)


@check(2)
def a_checkpoint_is_written_while_training_goes_on(run):
    # dcp's own thread runs collectives meanwhile: it wants a group of its own.
    group = dist.new_group(list(range(run.world_size)))
    model, optimizer = sharded(0)
    train(run, model, optimizer)
    kept = {name: whole(p).clone() for name, p in model.named_parameters()}
    weights, _ = get_state_dict(model, optimizer)
    folder = run.folder / "asynchronous"
    saving = dcp.async_save({"model": weights}, checkpoint_id=folder, process_group=group)
    train(run, model, optimizer)
    saving.result()
    again, _ = sharded(3)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    for name, parameter in again.named_parameters():
        close(whole(parameter), kept[name])
