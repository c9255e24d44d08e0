"""Operations without a reduction: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.request import Request
from potluck._core.engine.work import Work
from potluck.torch.process_group import buffers, staging
from potluck.torch.process_group.comms import Comms
from potluck.torch.process_group.options import seconds
from potluck.torch.process_group.staging import Crossing, Flat, cross, in_columns, in_pieces
from potluck.torch.process_group.work import GroupWork

_EXCHANGE = 1
"""The tag of messages of all_to_all."""


def broadcast(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Overwrite every rank's ``tensor`` with that of rank ``opts.rootRank``."""
    buffers.check(tensor, "broadcast")
    root = opts.rootRank
    timeout_s = seconds(opts, comms.timeout_s)

    def post(array: Array) -> Work:
        return comms.communicator.run(
            Request(Operation.BROADCAST, array, array, root=root, timeout_s=timeout_s)
        )

    is_root = root == comms.rank
    if staging.is_staged(comms, tensor):
        return in_pieces(comms, tensor, post, reads=is_root, writes=not is_root)
    if comms.fast_path(Operation.BROADCAST, opts, tensor, tensor, root=root):
        return GroupWork((), [tensor], comms.completions)
    array, is_shared = buffers.on_host(tensor)
    work = post(array)
    is_done = is_shared or is_root
    settle = None if is_done else lambda: buffers.store(array, tensor)
    return GroupWork((work,), [tensor], comms.completions, settle)


def all_gather_single(comms: Comms, output: Tensor, source: Tensor, opts: Any) -> GroupWork:
    """Gather all ranks' ``source`` into ``output``, concatenated in rank order."""
    buffers.check(source, "all_gather")
    buffers.check(output, "all_gather")
    if source.dtype != output.dtype:
        raise TypeError(
            f"all_gather: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )
    if output.numel() != source.numel() * comms.world_size:
        raise ValueError(
            f"all_gather: the output must have {comms.world_size} times the input's "
            f"{source.numel()} elements, one part per rank; it has {output.numel()}"
        )
    if staging.is_staged(comms, source, comms.world_size):
        whole = Flat(output)
        rows = list(whole.row.view(comms.world_size, -1))
        return _gather_staged(comms, source, rows, [output], opts, [whole])
    if comms.fast_path(Operation.ALL_GATHER, opts, source, output):
        return GroupWork((), [output], comms.completions)
    mine, _ = buffers.on_host(source)
    array, is_shared = buffers.on_host(output)
    timeout_s = seconds(opts, comms.timeout_s)
    work = comms.communicator.run(Request(Operation.ALL_GATHER, mine, array, timeout_s=timeout_s))
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork((work,), [output], comms.completions, settle)


def all_gather(comms: Comms, outputs: Sequence[Tensor], source: Tensor, opts: Any) -> GroupWork:
    """Gather rank i's ``source`` into ``outputs[i]``."""
    buffers.check(source, "all_gather")
    _one_each(comms, outputs, source, "all_gather", "output")
    if staging.is_staged(comms, source, comms.world_size):
        for output in outputs:
            buffers.check(output, "all_gather")
        return _gather_staged(comms, source, outputs, outputs, opts)
    mine, _ = buffers.on_host(source)
    array = buffers.room_for(outputs, "all_gather")
    timeout_s = seconds(opts, comms.timeout_s)
    work = comms.communicator.run(Request(Operation.ALL_GATHER, mine, array, timeout_s=timeout_s))
    return GroupWork(
        (work,), list(outputs), comms.completions, lambda: buffers.unpack(array, outputs)
    )


def gather(comms: Comms, outputs: Sequence[Tensor] | None, source: Tensor, opts: Any) -> GroupWork:
    """Gather rank i's ``source`` into ``outputs[i]`` on rank ``opts.rootRank``."""
    buffers.check(source, "gather")
    root = opts.rootRank
    timeout_s = seconds(opts, comms.timeout_s)
    is_root = comms.rank == root
    if outputs and not is_root:
        raise ValueError(f"gather: requires empty output on non-root: rank {root} is the root")
    if is_root:
        _one_each(comms, outputs or (), source, "gather", "output")
    if staging.is_staged(comms, source, comms.world_size):

        def post(given: Array, room: Array) -> Work:
            into = room if is_root else None
            return comms.communicator.run(
                Request(Operation.GATHER, given, into, root=root, timeout_s=timeout_s)
            )

        results = list(outputs or ())
        return in_columns(comms, [source], results, post, world_parts=comms.world_size)
    mine, _ = buffers.on_host(source)
    chosen = list(outputs or ())
    array = buffers.room_for(chosen, "gather") if is_root else None
    work = comms.communicator.run(
        Request(Operation.GATHER, mine, array, root=root, timeout_s=timeout_s)
    )
    settle = None if array is None else lambda: buffers.unpack(array, chosen)
    return GroupWork((work,), chosen, comms.completions, settle)


def scatter(comms: Comms, output: Tensor, parts: Sequence[Tensor] | None, opts: Any) -> GroupWork:
    """Overwrite ``output`` with ``parts[rank]`` of rank ``opts.rootRank``."""
    buffers.check(output, "scatter")
    root = opts.rootRank
    source: Array | None = None
    if comms.rank == root:
        chosen = parts or ()
        _one_each(comms, chosen, output, "scatter", "input")
        for part in chosen:
            buffers.check(part, "scatter")
    elif parts:
        raise ValueError(f"scatter: requires empty input on non-root: rank {root} is the root")
    timeout_s = seconds(opts, comms.timeout_s)
    if staging.is_staged(comms, output, comms.world_size):

        def post(given: Array, room: Array) -> Work:
            kept = given if comms.rank == root else None
            return comms.communicator.run(
                Request(Operation.SCATTER, kept, room, root=root, timeout_s=timeout_s)
            )

        return in_columns(comms, list(parts or ()), [output], post, world_parts=comms.world_size)
    if comms.rank == root:
        source = buffers.pack(parts or (), "scatter")
    array, is_shared = buffers.on_host(output)
    work = comms.communicator.run(
        Request(Operation.SCATTER, source, array, root=root, timeout_s=timeout_s)
    )
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork((work,), [output], comms.completions, settle)


def all_to_all(
    comms: Comms, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
) -> GroupWork:
    """Send ``inputs[i]`` to rank i and receive ``outputs[j]`` from rank j. Sizes may differ and be
    0."""
    for name, tensors in (("output", outputs), ("input", inputs)):
        if len(tensors) != comms.world_size:
            raise ValueError(
                f"all_to_all: the {name} list has {len(tensors)} tensors; it needs one for each "
                f"of the {comms.world_size} ranks"
            )
        for tensor in tensors:
            buffers.check(tensor, "all_to_all")
    if any(staging.is_elsewhere(tensor) for tensor in (*outputs, *inputs)):
        return _exchange_staged(comms, outputs, inputs, list(outputs), opts)
    received = [buffers.on_host(tensor) for tensor in outputs]
    sent = [buffers.on_host(tensor)[0] for tensor in inputs]
    works = _exchange(comms, [array for array, _ in received], sent, opts)

    def settle() -> None:
        for (array, is_shared), tensor in zip(received, outputs, strict=True):
            if not is_shared:
                buffers.store(array, tensor)

    return GroupWork(works, list(outputs), comms.completions, settle)


def all_to_all_single(
    comms: Comms,
    output: Tensor,
    source: Tensor,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
    opts: Any,
) -> GroupWork:
    """Send rows of ``source`` to each rank and receive rows of ``output`` from each. Sizes count
    rows; without sizes, rows are split equally."""
    buffers.check(output, "all_to_all_single")
    buffers.check(source, "all_to_all_single")
    if output.dtype != source.dtype:
        raise TypeError(
            f"all_to_all_single: the input is {source.dtype}, the output {output.dtype}; "
            "both must have one dtype"
        )
    incoming = _bounds(comms, output, output_sizes, "output")
    outgoing = _bounds(comms, source, input_sizes, "input")
    if staging.is_elsewhere(output) or staging.is_elsewhere(source):
        whole, given = Flat(output), Flat(source)
        received = [whole.row[start:end] for start, end in incoming]
        sent = [given.row[start:end] for start, end in outgoing]
        return _exchange_staged(comms, received, sent, [output], opts, [whole])
    array, is_shared = buffers.on_host(output)
    mine, _ = buffers.on_host(source)
    works = _exchange(
        comms,
        [array[start:end] for start, end in incoming],
        [mine[start:end] for start, end in outgoing],
        opts,
    )
    settle = None if is_shared else lambda: buffers.store(array, output)
    return GroupWork(works, [output], comms.completions, settle)


def barrier(comms: Comms, opts: Any) -> GroupWork:
    if comms.fast_path(Operation.BARRIER, opts, None, None):
        return GroupWork((), [], comms.completions)
    timeout_s = seconds(opts, comms.timeout_s)
    work = comms.communicator.run(Request(Operation.BARRIER, timeout_s=timeout_s))
    return GroupWork((work,), [], comms.completions)


def _gather_staged(
    comms: Comms,
    source: Tensor,
    rows: Sequence[Tensor],
    outputs: Sequence[Tensor],
    opts: Any,
    wholes: Sequence[Flat] = (),
) -> GroupWork:
    """Gather rank i's ``source`` into ``rows[i]``, parts of ``wholes``, through host memory."""
    timeout_s = seconds(opts, comms.timeout_s)

    def post(given: Array, room: Array) -> Work:
        return comms.communicator.run(
            Request(Operation.ALL_GATHER, given, room, timeout_s=timeout_s)
        )

    return in_columns(
        comms, [source], rows, post, world_parts=comms.world_size, tensors=outputs, wholes=wholes
    )


def _exchange_staged(
    comms: Comms,
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    outputs: Sequence[Tensor],
    opts: Any,
    wholes: Sequence[Flat] = (),
) -> GroupWork:
    """``_exchange`` for tensors on devices: each message is copied through host memory."""
    timeout_s = seconds(opts, comms.timeout_s)
    rank, world = comms.rank, comms.world_size
    _check_own(rank, received[rank], sent[rank])
    given, made = [Flat(each) for each in sent], [Flat(each) for each in received]
    made[rank].row.copy_(given[rank].row)
    lane = staging.lane_for(made[rank].row)
    crossings = []
    for step in range(1, world):
        source, target = (rank - step) % world, (rank + step) % world
        going, coming = lane.room([given[target].row]), lane.room([made[source].row])

        def post(
            going: Tensor = going, coming: Tensor = coming, source: int = source,
            target: int = target,
        ) -> Sequence[Work]:  # fmt: skip
            room, data = buffers.as_array(coming), buffers.as_array(going)
            return (
                comms.messages.recv(room, source, _EXCHANGE, timeout_s=timeout_s),
                comms.messages.send(data, target, _EXCHANGE, timeout_s=timeout_s),
            )

        crossings.append(
            Crossing([(given[target].row, going[0])], post, [(coming[0], made[source].row)])
        )
    return cross(comms, lane, outputs, crossings, [*made, *wholes])


def _exchange(
    comms: Comms, received: Sequence[Array], sent: Sequence[Array], opts: Any
) -> list[Work]:
    """Exchange messages between all pairs of ranks. Only the two ranks of a pair know its size."""
    timeout_s = seconds(opts, comms.timeout_s)
    rank, world = comms.rank, comms.world_size
    _check_own(rank, received[rank], sent[rank])
    received[rank][:] = sent[rank]
    works = []
    for step in range(1, world):
        source, target = (rank - step) % world, (rank + step) % world
        works.append(comms.messages.recv(received[source], source, _EXCHANGE, timeout_s=timeout_s))
        works.append(comms.messages.send(sent[target], target, _EXCHANGE, timeout_s=timeout_s))
    return works


def _check_own(rank: int, received: Array | Tensor, sent: Array | Tensor) -> None:
    sizes = [math.prod(each.shape) for each in (sent, received)]
    if sizes[0] != sizes[1] or received.dtype != sent.dtype:
        raise ValueError(
            f"all_to_all: rank {rank} sends itself {sizes[0]} elements of {sent.dtype} but "
            f"expects {sizes[1]} of {received.dtype}; the split sizes of input and output must "
            "agree"
        )


def _bounds(
    comms: Comms, tensor: Tensor, sizes: Sequence[int] | None, name: str
) -> list[tuple[int, int]]:
    """The (start, end) of each rank's part of the flat ``tensor``. ``sizes`` count rows; empty:
    equal parts."""
    world = comms.world_size
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
    comms: Comms, tensors: Sequence[Tensor], like: Tensor, operation: str, name: str
) -> None:
    if len(tensors) != comms.world_size:
        raise ValueError(
            f"{operation}: the {name} list has {len(tensors)} tensors; it needs one for each of "
            f"the {comms.world_size} ranks"
        )
    buffers.equal_parts(tensors, like, operation)
