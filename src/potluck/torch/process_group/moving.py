"""Operations without a reduction: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.work import Work
from potluck.torch.process_group import staging
from potluck.torch.process_group.staging import Crossing, Flat, cross, in_columns, in_place
from potluck.torch.process_group.work import GroupWork
from potluck.torch.process_group.world import Comms

_EXCHANGE = 1
"""The tag of messages of all_to_all."""


def broadcast(comms: Comms, tensor: Tensor, opts: Any) -> GroupWork:
    """Overwrite every rank's ``tensor`` with that of rank ``opts.rootRank``."""
    staging.check(tensor, "broadcast")
    root, is_root = opts.rootRank, opts.rootRank == comms.rank
    done = staging.fast_path(comms, Operation.BROADCAST, opts, tensor, tensor, root=root)
    if done is not None:
        return done

    def post(array: Array) -> Work:
        return comms.run(Operation.BROADCAST, opts, array, array, root=root)

    return in_place(comms, tensor, post, reads=is_root, writes=not is_root)


def all_gather_single(comms: Comms, output: Tensor, source: Tensor, opts: Any) -> GroupWork:
    """Gather all ranks' ``source`` into ``output``, concatenated in rank order."""
    staging.check_pair(source, output, "all_gather")
    whole, part = ("output", output), ("input", source)
    staging.check_whole(whole, part, comms.world_size, "all_gather")
    done = staging.fast_path(comms, Operation.ALL_GATHER, opts, source, output)
    return done if done is not None else _gathered(comms, output, source, opts)


def all_gather(comms: Comms, outputs: Sequence[Tensor], source: Tensor, opts: Any) -> GroupWork:
    """Gather rank i's ``source`` into ``outputs[i]``."""
    staging.check_parts(outputs, source, comms.world_size, "all_gather", "output")
    return _gathered(comms, outputs, source, opts)


def _gathered(
    comms: Comms, results: Sequence[Tensor] | Tensor, source: Tensor, opts: Any
) -> GroupWork:
    def post(given: Array, room: Array) -> Work:
        return comms.run(Operation.ALL_GATHER, opts, given, room)

    return in_columns(comms, [source], results, post)


def gather(comms: Comms, outputs: Sequence[Tensor] | None, source: Tensor, opts: Any) -> GroupWork:
    """Gather rank i's ``source`` into ``outputs[i]`` on rank ``opts.rootRank``."""
    staging.check(source, "gather")
    root, results = opts.rootRank, outputs or ()
    if root == comms.rank:
        staging.check_parts(results, source, comms.world_size, "gather", "output")
    elif results:
        raise ValueError(f"gather: requires empty output on non-root: rank {root} is the root")

    def post(given: Array, room: Array) -> Work:
        return comms.run(Operation.GATHER, opts, given, room if results else None, root=root)

    return in_columns(comms, [source], results, post)


def scatter(comms: Comms, output: Tensor, parts: Sequence[Tensor] | None, opts: Any) -> GroupWork:
    """Overwrite ``output`` with ``parts[rank]`` of rank ``opts.rootRank``."""
    staging.check(output, "scatter")
    root, sources = opts.rootRank, parts or ()
    if root == comms.rank:
        staging.check_parts(sources, output, comms.world_size, "scatter", "input")
    elif sources:
        raise ValueError(f"scatter: requires empty input on non-root: rank {root} is the root")

    def post(given: Array, room: Array) -> Work:
        return comms.run(Operation.SCATTER, opts, given if sources else None, room, root=root)

    return in_columns(comms, sources, [output], post)


def all_to_all(
    comms: Comms, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
) -> GroupWork:
    """Send ``inputs[i]`` to rank i and receive ``outputs[j]`` from rank j. Sizes may differ and be
    0."""
    for name, tensors in (("output", outputs), ("input", inputs)):
        staging.check_number(tensors, comms.world_size, "all_to_all", name)
        for tensor in tensors:
            staging.check(tensor, "all_to_all")
    made, given = [Flat(each) for each in outputs], [Flat(each) for each in inputs]
    received, sent = [each.row for each in made], [each.row for each in given]
    return _exchange(comms, received, sent, list(outputs), made, opts)


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
    staging.check_pair(source, output, "all_to_all_single")
    incoming = _bounds(comms, output, output_sizes, "output")
    outgoing = _bounds(comms, source, input_sizes, "input")
    whole, given = Flat(output), Flat(source)
    received = [whole.row[start:end] for start, end in incoming]
    sent = [given.row[start:end] for start, end in outgoing]
    return _exchange(comms, received, sent, [output], [whole], opts)


def barrier(comms: Comms, opts: Any) -> GroupWork:
    done = staging.fast_path(comms, Operation.BARRIER, opts, None, None)
    if done is not None:
        return done
    return GroupWork((comms.run(Operation.BARRIER, opts),), [], comms.completions)


def _exchange(
    comms: Comms,
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    outputs: Sequence[Tensor],
    flats: Sequence[Flat],
    opts: Any,
) -> GroupWork:
    """Exchange messages, rows of one dimension, between all pairs of ranks. Only the two ranks of a
    pair know its size. ``received`` are of ``flats``, which are of ``outputs``."""
    timeout_s = comms.seconds(opts)
    rank, world = comms.rank, comms.world_size
    into, own = received[rank], sent[rank]
    if into.shape != own.shape or into.dtype != own.dtype:
        raise ValueError(
            f"all_to_all: rank {rank} sends itself {own.numel()} elements of {own.dtype} but "
            f"expects {into.numel()} of {into.dtype}; the split sizes of input and output must "
            "agree"
        )
    into.copy_(own)
    lane = staging.lane_for(into)
    crossings = []
    for step in range(1, world):
        source, target = (rank - step) % world, (rank + step) % world
        going, coming = lane.room([sent[target]]), lane.room([received[source]])

        def post(
            going: Tensor = going, coming: Tensor = coming, source: int = source,
            target: int = target,
        ) -> Sequence[Work]:  # fmt: skip
            room, data = staging.as_array(coming), staging.as_array(going)
            return (
                comms.messages.recv(room, source, _EXCHANGE, timeout_s=timeout_s),
                comms.messages.send(data, target, _EXCHANGE, timeout_s=timeout_s),
            )

        crossings.append(
            Crossing([(sent[target], going[0])], post, [(coming[0], received[source])])
        )
    return cross(comms, lane, outputs, crossings, flats)


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
