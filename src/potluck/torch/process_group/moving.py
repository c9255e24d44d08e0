"""Operations that only move data: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from potluck.engine.layout import Array
from potluck.engine.work import Work
from potluck.torch.process_group import buffers
from potluck.torch.process_group.options import seconds
from potluck.torch.process_group.seat import Seat
from potluck.torch.process_group.staging import in_pieces, is_staged
from potluck.torch.process_group.work import GroupWork

_EXCHANGE = 1
"""The tag of all_to_all's messages."""


def broadcast(seat: Seat, tensor: Tensor, opts: Any) -> GroupWork:
    """Every rank's tensor becomes that of rank ``opts.rootRank``."""
    buffers.check(tensor, "broadcast")
    root = opts.rootRank
    timeout_s = seconds(opts, seat.timeout_s)

    def post(array: Array) -> Work:
        return seat.communicator.broadcast(array, root, timeout_s=timeout_s)

    is_root = root == seat.rank
    if is_staged(seat, tensor):
        return in_pieces(seat, tensor, post, reads=is_root, writes=not is_root)
    array, is_shared = buffers.on_host(tensor)
    work = post(array)
    is_done = is_shared or is_root
    settle = None if is_done else lambda: buffers.store(array, tensor)
    return GroupWork((work,), [tensor], seat.completions, settle)


def all_gather_single(seat: Seat, output: Tensor, source: Tensor, opts: Any) -> GroupWork:
    """``output`` becomes all ranks' ``source``, one after the other."""
    buffers.check(source, "all_gather")
    buffers.check(output, "all_gather")
    if source.dtype != output.dtype:
        raise TypeError(
            f"all_gather: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )
    if output.numel() != source.numel() * seat.world_size:
        raise ValueError(
            f"all_gather: the output must have {seat.world_size} times the input's "
            f"{source.numel()} elements, one part per rank; it has {output.numel()}"
        )
    mine, _ = buffers.on_host(source)
    array, is_shared = buffers.on_host(output)
    work = seat.communicator.all_gather(array, mine, timeout_s=seconds(opts, seat.timeout_s))
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork((work,), [output], seat.completions, settle)


def all_gather(seat: Seat, outputs: Sequence[Tensor], source: Tensor, opts: Any) -> GroupWork:
    """``outputs[i]`` becomes rank i's ``source``."""
    buffers.check(source, "all_gather")
    _one_each(seat, outputs, source, "all_gather", "output")
    mine, _ = buffers.on_host(source)
    array = buffers.room_for(outputs, "all_gather")
    work = seat.communicator.all_gather(array, mine, timeout_s=seconds(opts, seat.timeout_s))
    return GroupWork(
        (work,), list(outputs), seat.completions, lambda: buffers.unpack(array, outputs)
    )


def gather(seat: Seat, outputs: Sequence[Tensor] | None, source: Tensor, opts: Any) -> GroupWork:
    """On rank ``opts.rootRank``, ``outputs[i]`` becomes rank i's ``source``."""
    buffers.check(source, "gather")
    root = opts.rootRank
    mine, _ = buffers.on_host(source)
    timeout_s = seconds(opts, seat.timeout_s)
    if seat.rank != root:
        if outputs:
            raise ValueError(f"gather: requires empty output on non-root: rank {root} is the root")
        work = seat.communicator.gather(None, mine, root, timeout_s=timeout_s)
        return GroupWork((work,), [], seat.completions)
    chosen = outputs or ()
    _one_each(seat, chosen, source, "gather", "output")
    array = buffers.room_for(chosen, "gather")
    work = seat.communicator.gather(array, mine, root, timeout_s=timeout_s)
    return GroupWork((work,), list(chosen), seat.completions, lambda: buffers.unpack(array, chosen))


def scatter(seat: Seat, output: Tensor, parts: Sequence[Tensor] | None, opts: Any) -> GroupWork:
    """``output`` becomes ``parts[rank]`` of rank ``opts.rootRank``."""
    buffers.check(output, "scatter")
    root = opts.rootRank
    source: Array | None = None
    if seat.rank == root:
        chosen = parts or ()
        _one_each(seat, chosen, output, "scatter", "input")
        source = buffers.pack(chosen, "scatter")
    elif parts:
        raise ValueError(f"scatter: requires empty input on non-root: rank {root} is the root")
    array, is_shared = buffers.on_host(output)
    work = seat.communicator.scatter(array, source, root, timeout_s=seconds(opts, seat.timeout_s))
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork((work,), [output], seat.completions, settle)


def all_to_all(
    seat: Seat, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
) -> GroupWork:
    """``inputs[i]`` goes to rank i, ``outputs[j]`` comes from rank j; any sizes, also none."""
    for name, tensors in (("output", outputs), ("input", inputs)):
        if len(tensors) != seat.world_size:
            raise ValueError(
                f"all_to_all: the {name} list has {len(tensors)} tensors; it needs one for each "
                f"of the {seat.world_size} ranks"
            )
        for tensor in tensors:
            buffers.check(tensor, "all_to_all")
    received = [buffers.on_host(tensor) for tensor in outputs]
    sent = [buffers.on_host(tensor)[0] for tensor in inputs]
    works = _exchange(seat, [array for array, _ in received], sent, opts)

    def settle() -> None:
        for (array, is_shared), tensor in zip(received, outputs, strict=True):
            if not is_shared:
                buffers.store(array, tensor)

    return GroupWork(works, list(outputs), seat.completions, settle)


def all_to_all_single(
    seat: Seat,
    output: Tensor,
    source: Tensor,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
    opts: Any,
) -> GroupWork:
    """Rows of ``source`` to each rank, rows of ``output`` from each; equal shares without sizes."""
    buffers.check(output, "all_to_all_single")
    buffers.check(source, "all_to_all_single")
    if output.dtype != source.dtype:
        raise TypeError(
            f"all_to_all_single: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )
    incoming = _bounds(seat, output, output_sizes, "output")
    outgoing = _bounds(seat, source, input_sizes, "input")
    array, is_shared = buffers.on_host(output)
    mine, _ = buffers.on_host(source)
    works = _exchange(
        seat,
        [array[start:end] for start, end in incoming],
        [mine[start:end] for start, end in outgoing],
        opts,
    )
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork(works, [output], seat.completions, settle)


def barrier(seat: Seat, opts: Any) -> GroupWork:
    work = seat.communicator.barrier(timeout_s=seconds(opts, seat.timeout_s))
    return GroupWork((work,), [], seat.completions)


def _exchange(
    seat: Seat, received: Sequence[Array], sent: Sequence[Array], opts: Any
) -> list[Work]:
    """Messages between all pairs. Sizes may differ, so only the two ends of each know them."""
    timeout_s = seconds(opts, seat.timeout_s)
    rank, world = seat.rank, seat.world_size
    if received[rank].shape != sent[rank].shape or received[rank].dtype != sent[rank].dtype:
        raise ValueError(
            f"all_to_all: rank {rank} sends itself {sent[rank].size} elements of "
            f"{sent[rank].dtype} but expects {received[rank].size} of {received[rank].dtype}; "
            "the split sizes of input and output must agree"
        )
    received[rank][:] = sent[rank]
    works = []
    for step in range(1, world):
        source, target = (rank - step) % world, (rank + step) % world
        works.append(seat.messages.recv(received[source], source, _EXCHANGE, timeout_s=timeout_s))
        works.append(seat.messages.send(sent[target], target, _EXCHANGE, timeout_s=timeout_s))
    return works


def _bounds(
    seat: Seat, tensor: Tensor, sizes: Sequence[int] | None, name: str
) -> list[tuple[int, int]]:
    """Each rank's part of the flat ``tensor``, from sizes in rows (equal shares without)."""
    world = seat.world_size
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    if not sizes:
        if rows % world:
            raise ValueError(
                f"all_to_all_single: the {name} has {rows} rows, which can't be split equally "
                f"over {world} ranks (Tensor's dim 0 does not divide equally across group size); "
                f"pass {name}_split_sizes"
            )
        sizes = [rows // world] * world
    if len(sizes) != world:
        raise ValueError(
            f"all_to_all_single: {len(sizes)} {name} split sizes for {world} ranks; give one "
            "each (Number of tensor splits not equal to group size)"
        )
    if sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all_single: the {name} split sizes {list(sizes)} add up to {sum(sizes)}, but "
            f"the {name} has {rows} rows (Split sizes doesn't match total dim 0 size)"
        )
    width = tensor.numel() // rows if rows else 0
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start * width, (start + size) * width))
        start += size
    return bounds


def _one_each(
    seat: Seat, tensors: Sequence[Tensor], like: Tensor, operation: str, name: str
) -> None:
    if len(tensors) != seat.world_size:
        raise ValueError(
            f"{operation}: the {name} list has {len(tensors)} tensors; it needs one for each of "
            f"the {seat.world_size} ranks"
        )
    buffers.equal_parts(tensors, like, operation)
