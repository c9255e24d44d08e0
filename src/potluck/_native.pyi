"""What the extension offers, for type checkers: kept by hand beside native/bind*.cpp."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

version: str
has_openssl: bool

def cpu_features() -> list[str]: ...

# bind_kernels.cpp; anything with the buffer protocol is a buffer

def combine(dtype: int, op: int, target: Any, source: Any) -> None: ...
def combine_many(dtype: int, op: int, target: Any, sources: Sequence[Any]) -> None: ...
def divide(dtype: int, array: Any, divisor: int) -> None: ...
def encode(codec: int, encoded: Any, source: Any) -> None: ...
def encode_with_residual(codec: int, encoded: Any, residual: Any, source: Any) -> None: ...
def decode(codec: int, target: Any, encoded: Any) -> None: ...
def decode_accumulate(codec: int, target: Any, encoded: Any) -> None: ...
def crc32c(data: Any, before: int = 0) -> int: ...
def crc32c_portable(data: Any, before: int = 0) -> int: ...
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
    def __init__(self, ca: str, chain: str, is_server: bool) -> None: ...

class TlsStream:
    error: int
    reason: str
    def __init__(self, context: TlsContext, fd: int, peer: str) -> None: ...
    def handshake(self) -> TlsStatus: ...
    def read_into(self, target: Any, count: int) -> tuple[TlsStatus, int]: ...
    def write_all(self, source: Any) -> TlsStatus: ...
    def pending(self) -> int: ...
    def peer_certificate(self) -> bytes: ...

class Ticket:
    state: str
    seconds: float
    source: int
    def wait(self, seconds: float) -> bool: ...

class Loop:
    def __init__(
        self, epoch: int, rank: int, world_size: int, segment_bytes: int, max_early_bytes: int
    ) -> None: ...
    def ticket(self, ident: int) -> Ticket: ...
    def start(
        self,
        ticket: Ticket,
        call: str,
        fingerprint: int,
        channel: int,
        sequence: int,
        deadline: float,
        dtype: int,
        op: int,
        segment_bytes: int,
        ranks: Sequence[int],
        chunks: Sequence[tuple[int, int, int]],
        steps: Sequence[tuple[int, int, int]],
        mean: int,
        mean_elements: int,
        codec: int,
        own: int,
        residuals: Sequence[int],
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
    def adopt(
        self,
        ident: int,
        rank: int,
        stream: TlsStream,
        peer: str,
        slot_bytes: int,
        outgoing: Sequence[int],
        incoming: Sequence[int],
    ) -> None: ...
    def no_link(self, rank: int) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def join(self) -> None: ...
    def say(self, body: bytes, has_abort: bool) -> None: ...
    def events(self, seconds: float) -> list[tuple[str, int]]: ...
    def fact(self) -> tuple[str, int, str, str | None, list[tuple[int, str]], bytes]: ...
    def take_counters(self, rank: int) -> tuple[int, int, int, int, int]: ...
