"""What the extension offers, for type checkers: kept by hand beside native/bind*.cpp."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

version: str
interface: str
has_openssl: bool

def cpu_features() -> list[str]: ...

# bind_kernels.cpp; anything with the buffer protocol is a buffer

def combine(dtype: int, op: str, target: Any, source: Any) -> None: ...
def combine_many(dtype: int, op: str, target: Any, sources: Sequence[Any]) -> None: ...
def divide(dtype: int, array: Any, divisor: float) -> None: ...
def encode(codec: int, encoded: Any, source: Any) -> int: ...
def encode_with_residual(codec: int, encoded: Any, residual: Any, source: Any) -> int: ...
def decode(codec: int, target: Any, encoded: Any) -> None: ...
def decode_accumulate(codec: int, target: Any, encoded: Any) -> None: ...
def select_largest(
    positions: Any, values: Any, source: Any, residual: Any, chunk: int, k: int, last_k: int
) -> None: ...
def multiply(dtype: int, target: Any, left: Any, right: Any, rank: int) -> None: ...
def count_values(text: Any, most: int, max_depth: int) -> int: ...
def kernel_sets() -> list[str]: ...
def kernel_set() -> str: ...
def use_kernel_set(name: str) -> None: ...

# bind_loop.cpp; only where has_openssl

class TlsStatus(Enum):
    DONE = 0
    WANTS_READ = 1
    WANTS_WRITE = 2
    ENDED = 3
    FAILED = 4
    REFUSED = 5
    DISTRUSTED = 6

class TlsContext:
    def __init__(self, ca: str, chain: str, is_server: bool, records_per_key: int) -> None: ...

class Stream:
    is_readable: bool
    def send(self, source: Any) -> int: ...
    def recv_into(self, target: Any) -> int: ...
    def flush(self) -> bool: ...

class TlsStream(Stream):
    error: int
    num_keys: int
    reason: str
    def __init__(self, context: TlsContext, fd: int, peer: str) -> None: ...
    def take_over(self, peer: str) -> None: ...
    def handshake(self) -> TlsStatus: ...
    def read_into(self, target: Any, count: int) -> tuple[TlsStatus, int]: ...
    def write_all(self, source: Any) -> TlsStatus: ...
    def pending(self) -> int: ...
    def peer_certificate(self) -> bytes: ...

class Ticket:
    state: str
    seconds: float
    num_beyond: int
    source: int
    def wait(self, seconds: float) -> bool: ...

class CompiledPlan:
    def __init__(
        self,
        call: str,
        fingerprint: int,
        channel: int,
        dtype: int,
        op: str,
        segment_bytes: int,
        ranks: Sequence[int],
        chunks: Sequence[tuple[int, int, int, int, int, int]],
        steps: Sequence[tuple[int, int, int, bool]],
        num_concluded: int,
        divisor: float,
        scale: float,
        late_scale: float,
        is_computed_by_all: bool,
        codec: int,
    ) -> None: ...

class ProgressLoop:
    def __init__(
        self, epoch: int, rank: int, world_size: int, segment_bytes: int, max_early_bytes: int
    ) -> None: ...
    def ticket(self, ident: int) -> Ticket: ...
    def start(
        self,
        ticket: Ticket,
        plan: CompiledPlan,
        sequence: int,
        deadline: float,
        source: Any,
        result: Any,
        scratch: Any,
        narrowed: Any,
        residual: Any,
    ) -> None: ...
    def send(
        self,
        ticket: Ticket,
        call: str,
        peer: int,
        channel: int,
        tag: int,
        dtype: int,
        data: int,
        nbytes: int,
        deadline: float,
    ) -> None: ...
    def receive(
        self,
        ticket: Ticket,
        call: str,
        source: int,
        channel: int,
        ranks: Sequence[int],
        tag: int,
        dtype: int,
        data: int,
        nbytes: int,
        deadline: float,
    ) -> None: ...
    def leave(self, channel: int, next_sequence: int) -> None: ...
    def adopt(
        self,
        ident: int,
        rank: int,
        stream: Stream,
        peer: str,
        slot_bytes: int,
        outgoing: Sequence[int],
        incoming: Sequence[int],
    ) -> None: ...
    def no_link(self, rank: int) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def join(self) -> None: ...
    def set_abort(self, body: bytes, has_abort: bool) -> None: ...
    def events(self, seconds: float) -> list[tuple[str, int]]: ...
    def failure(
        self,
    ) -> tuple[str, int, str, str | None, list[tuple[int, str]], bytes, int, int]: ...
    def take_counters(self, rank: int) -> tuple[int, int, int, int, int]: ...

# bind_shm.cpp

class ShmEngine:
    def __init__(self, operations: Sequence[str], reductions: Sequence[str]) -> None: ...
    def close(self) -> None: ...
    def next_ended(self) -> int: ...

class ShmCall:
    @property
    def done(self) -> bool: ...
    def failure(self) -> tuple[str, int, bool, int] | None: ...
    def wait(self, seconds: float) -> bool: ...
    def watch(self) -> bool: ...

class ShmChannel:
    def __init__(
        self,
        memory: Any,
        rank: int,
        world: int,
        num_slots: int,
        slot_bytes: int,
        small_bytes: int,
        spin_s: float,
        salt: int,
        sequence: int,
        engine: ShmEngine,
        error_of: Callable[..., BaseException],
    ) -> None: ...
    def take_sequence(self) -> int: ...
    def fast_path(
        self,
        operation: str,
        source: Any,
        result: Any,
        op: str | None,
        root: int,
        timeout_s: float,
        is_flat: bool,
        /,
    ) -> bool: ...
    def start(
        self,
        operation: str,
        dtype: int,
        op: str | None,
        root: int,
        dims: Sequence[int],
        source: int,
        result: int,
        sequence: int,
        timeout_s: float,
        id: int,
        /,
    ) -> ShmCall: ...
    def can_combine(self, dtype: int, op: str) -> bool: ...
    def note_link_call(self, sequence: int, fingerprint: int) -> None: ...
    def abandoned_failure(self) -> tuple[str, tuple[str, int, bool, int]] | None: ...
    def ongoing(self) -> int: ...
    def stop(self, for_all: bool) -> None: ...
    def leave(self) -> None: ...
    def leave_channel(self) -> None: ...
    def close(self) -> None: ...
    def drain(self) -> None: ...
    def waited_s(self) -> float: ...
    def stats(self) -> list[tuple[list[int], list[int], float, int]]: ...

def shm_bytes(world: int, num_slots: int, slot_bytes: int) -> int: ...
def shm_costs() -> tuple[float, float, float, float]: ...
