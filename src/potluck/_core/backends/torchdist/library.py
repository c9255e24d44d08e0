"""The calls of a c10d process group, for Gloo and NCCL."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from potluck._core.backends.library import ANY_SOURCE, Collective, FlatCall, Library, Waiter
from potluck._core.backends.torchdist.store import ErrorChannel, StoreMessage
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.types import ReduceOp
from potluck.errors import Desync, GroupError, OperationTimeout, PeerLost, PotluckError

OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PRODUCT",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS = frozenset({"int8", "uint8", "int32", "int64"})


@dataclass(eq=False, repr=False)
class TorchLibrary(ABC):
    """A c10d process group as a ``Library``, the base of Gloo and NCCL.

    Operations without a reduction use bytes, so that they support every dtype.
    """

    store: Any
    prefix: str
    rank: int
    world_size: int
    errors: ErrorChannel
    timeout_s: float
    device: str | None = None
    name = ""
    tag_limit = 2**31 - 1

    def __post_init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch = torch
        self._dist = dist
        self._is_part = False
        self.collectives: dict[Operation, Collective] = {
            Operation.ALL_REDUCE: self._all_reduce,
            Operation.REDUCE: self._reduce,
            Operation.ALL_GATHER: self._all_gather,
            Operation.BROADCAST: self._broadcast,
            Operation.SCATTER: self._scatter,
            Operation.GATHER: self._gather,
            Operation.ALL_TO_ALL: self._all_to_all,
            Operation.BARRIER: self._barrier,
        }
        own = dist.distributed_c10d.PrefixStore(f"{self.prefix}/{self.name}", self.store)
        self._group: Any = self._translate(lambda: self._connect(own))

    @abstractmethod
    def _connect(self, store: Any) -> Any:
        """The c10d process group of all ranks, which meet at ``store``."""

    # -- arrays as tensors

    @abstractmethod
    def _typed(self, array: Any) -> Any:
        """The array's memory as a tensor of its dtype."""

    @abstractmethod
    def _bytes(self, array: Any) -> Any:
        """The array's memory as a tensor of bytes."""

    # -- collectives

    @abstractmethod
    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        """See ``Library``."""

    def _all_reduce(self, call: FlatCall, deadline: float) -> None:
        options = self._options("AllreduceOptions", deadline, reduceOp=self._op(call))
        self._run(lambda: self._group.allreduce([self._typed(call.result)], options), deadline)

    def _reduce(self, call: FlatCall, deadline: float) -> None:
        options = self._options(
            "ReduceOptions", deadline, reduceOp=self._op(call), rootRank=call.root
        )
        tensor = self._typed(call.source)
        if call.result is None:
            tensor = tensor.clone()  # the library uses it as scratch memory
        self._run(lambda: self._group.reduce([tensor], options), deadline)

    def _all_gather(self, call: FlatCall, deadline: float) -> None:
        options = self._options("AllgatherOptions", deadline)
        tensors = self._bytes(call.result), self._bytes(call.source)
        self._run(lambda: self._group._allgather_base(*tensors, options), deadline)

    def _broadcast(self, call: FlatCall, deadline: float) -> None:
        options = self._options("BroadcastOptions", deadline, rootRank=call.root, rootTensor=0)
        self._run(lambda: self._group.broadcast([self._bytes(call.source)], options), deadline)

    def _scatter(self, call: FlatCall, deadline: float) -> None:
        options = self._options("ScatterOptions", deadline, rootRank=call.root)
        parts, mine = self._rows(call.source), [self._bytes(call.result)]
        self._run(lambda: self._group.scatter(mine, parts, options), deadline)

    def _gather(self, call: FlatCall, deadline: float) -> None:
        options = self._options("GatherOptions", deadline, rootRank=call.root)
        rows, mine = self._rows(call.result), [self._bytes(call.source)]
        self._run(lambda: self._group.gather(rows, mine, options), deadline)

    def _all_to_all(self, call: FlatCall, deadline: float) -> None:
        options = self._options("AllToAllOptions", deadline)
        tensors = self._bytes(call.result), self._bytes(call.source)
        self._run(lambda: self._group.alltoall_base(*tensors, [], [], options), deadline)

    def _barrier(self, call: FlatCall, deadline: float) -> None:
        one = self._one()
        self._all_reduce(FlatCall(one, one), deadline)

    def _one(self) -> Array:
        return np.ones(1, dtype=np.int32)

    # -- messages

    def settle(self) -> None:
        return None

    def check_message(self, peer: int, tag: int) -> None:
        return None

    def send(self, array: Array, peer: int, tag: int) -> Waiter:
        tensor = self._bytes(array)
        work = self._translate(lambda: self._group.send([tensor], peer, tag))

        def wait(deadline: float) -> int:
            self._translate(lambda: work.wait(left(deadline)))
            return peer

        return wait

    def recv(self, array: Array, peer: int, tag: int) -> Waiter:
        tensor = self._bytes(array)
        if peer == ANY_SOURCE:
            work = self._translate(lambda: self._group.recv_anysource([tensor], tag))
        else:
            work = self._translate(lambda: self._group.recv([tensor], peer, tag))

        def wait(deadline: float) -> int:
            self._translate(lambda: work.wait(left(deadline)))
            return work._source_rank() if peer == ANY_SOURCE else peer

        return wait

    # -- groups and lifetime

    def split(self, ranks: tuple[int, ...], number: int, deadline: float) -> Library | None:
        if self.rank not in ranks:
            return None
        rank, prefix = ranks.index(self.rank), f"{self.prefix}/{number}"
        part = replace(self, prefix=prefix, rank=rank, world_size=len(ranks))
        part._is_part = True
        return part

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        self.errors.listen(on_error)

    def tell(self, error: PotluckError) -> None:
        self.errors.tell(StoreMessage("error", self.errors.rank, str(error)))

    def close(self, is_orderly: bool) -> None:
        self._group = None
        if not self._is_part:
            self.errors.close()
        self.store = None

    # -- inside

    def _rows(self, array: Array | None) -> list[list[Any]]:
        """All ranks' parts in torch's form; an empty list if this rank has none."""
        return [] if array is None else [list(self._bytes(array).reshape(self.world_size, -1))]

    def _op(self, call: FlatCall) -> Any:
        return getattr(self._dist.ReduceOp, OPS[call.op])

    def _options(self, name: str, deadline: float, **fields: Any) -> Any:
        options = getattr(self._dist.distributed_c10d, name)()
        options.timeout = left(deadline)
        for field, value in fields.items():
            setattr(options, field, value)
        return options

    def _run(self, start: Callable[[], Any], deadline: float) -> None:
        self._translate(lambda: start().wait())

    def _translate(self, call: Callable[[], Any]) -> Any:
        """Call ``call``, and convert errors of torch to GroupErrors."""
        try:
            return call()
        except PotluckError:
            raise
        except RuntimeError as error:
            text = str(error).splitlines()[0].rpartition("] ")[2].replace(" GLHF! 🏖️", "")
            kind = next((kind for sign, kind in _MEANINGS if sign in str(error)), GroupError)
            if kind is PeerLost:
                raise self._lost(text) from error
            raise kind(f"{self.name} says: {text}") from error

    def _lost(self, text: str) -> PeerLost:
        """The error for a lost connection. The lost rank is determined through the store, if that
        is available, and sent to all ranks."""
        rank = self.errors.find_lost()
        if rank < 0:
            return PeerLost(f"{self.name} says: {text}")
        text = f"lost rank {rank}; {self.name} says: {text}"
        self.errors.tell(StoreMessage("lost", rank, text))
        return PeerLost(text, rank=rank, certain=True)


_MEANINGS: tuple[tuple[str, type[GroupError]], ...] = (
    ("imed out", OperationTimeout),
    ("imeout", OperationTimeout),
    ("collective mismatch", Desync),
    ("onnection closed by peer", PeerLost),
    ("onnection reset", PeerLost),
    ("onnection refused", PeerLost),
    ("Broken pipe", PeerLost),
    ("ead error", PeerLost),
    ("rite error", PeerLost),
    ("remote process exited", PeerLost),
)


def left(deadline: float) -> timedelta:
    """The time until ``deadline``, at least 1 ms: zero would mean no limit."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))
