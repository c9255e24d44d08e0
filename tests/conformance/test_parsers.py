"""Every parser of what others send: hostile input ends with its own error, and in bounded time.

The inputs are searched for: shapes of msgpack and JSON (keys with equal hashes, nesting, many tiny
values, long numbers, descriptions of arrays), alone and in the place of each field of each message.
None may take more than ``MOST`` times of the processor time of an honest text of the same size.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import pkgutil
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import potluck
from potluck._core import wire
from potluck._core.cluster.content.package import (
    PackageManifest,
    check_manifest,
    decode_description,
)
from potluck._core.cluster.environments.plan import Plan, decode_plan
from potluck._core.transport.delegation import Delegation, decode_delegation
from potluck._core.wire import broker, frames, services
from potluck._core.wire.format import MessageFormat, decoded
from potluck._core.wire.payload import pack, unpack
from potluck.checkpoint import manifest, state
from potluck.errors import CheckpointError, ProtocolError, SecurityError
from potluck.parameter_server import log as server_log

MOST = 20
SIZE = 64 << 10
"""Bytes of each input that is searched with: what is quadratic shows here."""
WHOLE = 1 << 20
"""Bytes of the inputs of the parser that takes values of any shape."""


class Parser(NamedTuple):
    """A parser: the type of its messages (None: values of any shape), the most bytes it is given,
    and its error."""

    name: str
    parse: Callable[[bytes], Any]
    type: Any
    limit: int = SIZE
    error: type[Exception] = ProtocolError
    is_json: bool = False


def formats() -> Iterator[Parser]:
    """All instances of ``MessageFormat`` in potluck, whose place is its folder ``wire``."""
    seen = set()
    for found in pkgutil.walk_packages(wire.__path__, f"{wire.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            if isinstance(value, MessageFormat) and id(value) not in seen:
                seen.add(id(value))
                kind = value._decoder.type
                yield Parser(f"{found.name}.{name}", value.decode, kind, min(value.limit, SIZE))


def head(kind: Any) -> Callable[[bytes], Any]:
    decoder = msgspec.msgpack.Decoder(kind)
    return lambda data: decoded(decoder, data, "the head of a call")


def described(manifest: bytes) -> object:
    data = struct.pack("<I", len(manifest)) + manifest
    package = decode_description(data, hashlib.sha256(manifest).digest())
    check_manifest(package.manifest)
    return package


PARSERS = [
    Parser("payload", lambda data: unpack(data, WHOLE), None, WHOLE),
    *formats(),
    Parser("plan of an environment", decode_plan, Plan, is_json=True),
    Parser("request of a service", head(services.Request), services.Request),
    Parser("reply of a service", head(services.Reply), services.Reply),
    Parser("request of a sandbox", broker.decode_request, broker.Request, broker.MAX_PACKET),
    Parser("answer to a sandbox", broker.decode_answer, broker.Answer, broker.MAX_PACKET),
    Parser(
        "manifest of a package",
        described,
        PackageManifest,
    ),
    Parser("log of a parameter server", server_log.decode, list[server_log.AnyEntry]),
    Parser("ABORT", frames.decode_abort, frames.Abort, frames.MAX_CONTROL),
    Parser("RTS", frames.decode_rts, frames.Rts, frames.MAX_CONTROL),
    Parser("delegation", decode_delegation, Delegation, error=SecurityError),
    Parser(
        "head of a state",
        lambda data: state.specs_in(b"12345678" + data),
        None,
        error=CheckpointError,
        is_json=True,
    ),
    Parser(
        "state",
        lambda data: state.decode(struct.pack("<Q", len(data)) + data),
        None,
        error=CheckpointError,
        is_json=True,
    ),
    Parser(
        "manifest of a checkpoint",
        lambda data: manifest.unseal(data, Path("m.json"), manifest.Manifest),
        manifest.Manifest,
        error=CheckpointError,
        is_json=True,
    ),
]


# -- shapes


def repeated(start: bytes, unit: Callable[[int], bytes], size: int) -> tuple[bytes, int]:
    parts = [start]
    length, count = len(start), 0
    while length < size:
        parts.append(unit(count))
        length += len(parts[-1])
        count += 1
    return b"".join(parts), count


def array_of(unit: Callable[[int], bytes], size: int) -> bytes:
    body, count = repeated(b"", unit, size - 5)
    return b"\xdd" + struct.pack(">I", count) + body


def map_of(key: Callable[[int], bytes], size: int) -> bytes:
    body, count = repeated(b"", lambda number: key(number) + b"\xc0", size - 5)
    return b"\xdf" + struct.pack(">I", count) + body


def extension(code: int, data: bytes) -> bytes:
    return b"\xc9" + struct.pack(">IB", len(data), code) + data


def equal_hashes(number: int) -> bytes:
    """An array of -1 and -2, whose hashes are equal, different for each number."""
    return b"\xdc\x00\x14" + bytes(0xFF if number >> bit & 1 else 0xFE for bit in range(20))


def integer(number: int) -> bytes:
    return b"\xcf" + struct.pack(">Q", number % 2**64)


def double(number: float) -> bytes:
    return b"\xcb" + struct.pack(">d", number)


def nested(opening: bytes, closing: bytes, size: int) -> bytes:
    return opening * (size // len(opening)) + closing


def nested_tuples(size: int) -> bytes:
    """Tuples within tuples: each level is an extension with its own length."""
    text = b"\x90"
    while len(text) < min(size, 4000):
        text = extension(2, b"\x91" + text)
    return text


SPEC = struct.pack("<BB", 0, 3)

MSGPACK: dict[str, Callable[[int], bytes]] = {
    "keys with equal hashes": lambda size: map_of(equal_hashes, size),
    "the same in tuples": lambda size: map_of(lambda n: extension(2, equal_hashes(n)), size),
    "the same in a tuple of maps": lambda size: extension(
        2, b"\x91" + map_of(equal_hashes, size - 6)
    ),
    "integers with equal low bits": lambda size: map_of(lambda n: integer(n << 44), size),
    "integers with equal high bits": lambda size: map_of(integer, size),
    "integers around the modulus of hashes": lambda size: map_of(
        lambda n: integer(n % 8 * (2**61 - 1) + n // 8), size
    ),
    "doubles as keys": lambda size: map_of(lambda n: double(2.0 ** (61 * (n % 16)) * n), size),
    "equal texts as keys": lambda size: map_of(lambda n: b"\xa1a", size),
    "empty texts as keys": lambda size: map_of(lambda n: b"\xa0", size),
    "long texts as keys": lambda size: map_of(lambda n: b"\xda\x03\xe8" + b"%1000d" % n, size),
    "extensions as keys": lambda size: map_of(
        lambda n: extension(3, b"\x08" + struct.pack("<q", n)), size
    ),
    "arrays in arrays": lambda size: nested(b"\x91", b"\x90", size),
    "maps in maps": lambda size: nested(b"\x81\xa1a", b"\x80", size),
    "maps in keys": lambda size: nested(b"\x81", b"\x80", size),
    "short towers": lambda size: array_of(lambda n: b"\x91" * 60 + b"\x90", size),
    "tuples in tuples": nested_tuples,
    "many nothings": lambda size: array_of(lambda n: b"\xc0", size),
    "many zeros": lambda size: array_of(lambda n: b"\x00", size),
    "many empty texts": lambda size: array_of(lambda n: b"\xa0", size),
    "many empty maps": lambda size: array_of(lambda n: b"\x80", size),
    "many empty arrays": lambda size: array_of(lambda n: b"\x90", size),
    "many maps of one": lambda size: array_of(lambda n: b"\x81\xa1a\xc0", size),
    "many empty bytes": lambda size: array_of(lambda n: b"\xc4\x00", size),
    "many integers": lambda size: array_of(lambda n: integer(2**63 + n), size),
    "many doubles": lambda size: array_of(lambda n: double(n / 3), size),
    "many empty tuples": lambda size: array_of(lambda n: extension(2, b"\x90"), size),
    "many scalars": lambda size: array_of(lambda n: b"\xd5\x03\x05\x01", size),
    "many empty arrays of NumPy": lambda size: array_of(
        lambda n: extension(1, SPEC + struct.pack("<Q", 0)), size
    ),
    "arrays of many dimensions": lambda size: array_of(
        lambda n: extension(1, SPEC + struct.pack("<32Q", *[1] * 31, n % 2)), size
    ),
    "empty arrays of huge dimensions": lambda size: array_of(
        lambda n: extension(1, struct.pack("<BB3Q", n % 2, 3, 1 << 40, 1 << 40, 0)), size
    ),
    "a long extension": lambda size: extension(1, bytes(size)),
    "a long unknown extension": lambda size: extension(9, bytes(size)),
    "many unknown extensions": lambda size: array_of(lambda n: b"\xd4\x09\x00", size),
    "a long text": lambda size: b"\xdb" + struct.pack(">I", size) + b"a" * size,
    "a text that is no UTF-8": lambda size: b"\xdb" + struct.pack(">I", size) + b"\xff" * size,
    "an announced array": lambda size: b"\xdd\xff\xff\xff\xff" + bytes(size),
    "an announced map": lambda size: b"\xdf\xff\xff\xff\xff" + bytes(size),
    "a path of many folders": lambda size: (
        b"\x81\xa5files" + array_of(lambda n: package_file(f"{n}/" + "a/" * 500 + "b"), size)
    ),
    "paths that differ in case": lambda size: (
        b"\x81\xa5files" + array_of(lambda n: package_file(f"{'Aa'[n % 2]}{n}"), size)
    ),
}


def package_file(path: str) -> bytes:
    return msgspec.msgpack.encode(
        {"path": path, "size": 1, "sha256": bytes(32), "executable": False}
    )


def filled(start: str, unit: str, end: str, size: int) -> bytes:
    return (start + unit * ((size - len(start) - len(end)) // len(unit)) + end).encode()


JSON: dict[str, Callable[[int], bytes]] = {
    "arrays in arrays": lambda size: b"[" * size,
    "closed arrays in arrays": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "objects in objects": lambda size: b'{"a":' * (size // 5),
    "a long integer": lambda size: b"1" * size,
    "many long integers": lambda size: filled("[0", "," + "1" * 4200, "]", size),
    "many integers of 300 digits": lambda size: filled("[0", "," + "9" * 300, "]", size),
    "a long fraction": lambda size: b"0." + b"1" * size,
    "long fractions": lambda size: filled("[0", ",0." + "123456789" * 80, "]", size),
    "large exponents": lambda size: filled("[0", ",1e400", "]", size),
    "small exponents": lambda size: filled("[0", ",1e-400", "]", size),
    "many zeros": lambda size: filled("[0", ",0", "]", size),
    "many empty texts": lambda size: filled("[0", ',""', "]", size),
    "many empty objects": lambda size: filled("[0", ",{}", "]", size),
    "many escapes": lambda size: filled('"', "\\u00e9", '"', size),
    "half pairs": lambda size: filled('"', "\\ud800", '"', size),
    "equal keys": lambda size: filled('{"a":0', ',"a":0', "}", size),
    "blanks": lambda size: b" " * size,
    "not a number": lambda size: filled("[0", ",NaN", "]", size),
    "shapes of many dimensions": lambda size: filled(
        '{"a":{"dtype":"F32","shape":[1', ",9999999999", "]}}", size
    ),
    "many tensors": lambda size: (
        b"{"
        + b",".join(
            b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(size // 55)
        )
        + b"}"
    ),
}


def honest_msgpack(size: int) -> bytes:
    record = {"name": "layer.1.weight", "lr": 0.125, "step": 70_000, "shape": [64, 32], "ok": True}
    one = msgspec.msgpack.encode(record)
    return array_of(lambda number: one, size)


def honest_payload(size: int) -> bytes:
    states = [
        {
            "name": f"layer.{number}.weight",
            "moment": np.zeros((8, 4)),
            "lr": np.float32(0.125),
            "step": 70_000 + number,
            "betas": (0.9, 0.999),
            "nesterov": True,
        }
        for number in range(size // 130)
    ]
    return bytes(pack(states).header)


def honest_json(size: int) -> bytes:
    record = {"name": "layer.1.weight", "lr": 0.125, "step": 70_000, "shape": [64, 32], "ok": True}
    return filled("[0", "," + json.dumps(record), "]", size)


# -- inputs of a parser


def structs_in(kind: Any) -> list[Any]:
    """All message types that ``kind`` may hold at its top, as msgspec describes them."""
    info = msgspec.inspect.type_info(kind)
    found, left = [], [info]
    while left:
        each = left.pop()
        if isinstance(each, msgspec.inspect.UnionType):
            left.extend(each.types)
        elif isinstance(each, msgspec.inspect.StructType):
            found.append(each)
        elif hasattr(each, "item_type"):
            left.append(each.item_type)
        elif hasattr(each, "item_types"):
            left.extend(each.item_types)
    return found


def placed(struct_type: Any, shape: bytes) -> Iterator[bytes]:
    """``shape`` as the value of each field of a message, and of one that it does not have."""
    tag = [] if struct_type.tag is None else [(struct_type.tag_field, struct_type.tag)]
    fields = [field.encode_name for field in struct_type.fields]
    if struct_type.array_like:
        start = [msgspec.msgpack.encode(value) for _, value in tag]
        for place in range(len(fields) + 1):
            values = [*start, *[b"\xc0"] * place, shape]
            yield b"\xdc" + struct.pack(">H", len(values)) + b"".join(values)
        return
    for field in [*fields, "of a later version"]:
        pairs = [(msgspec.msgpack.encode(k), msgspec.msgpack.encode(v)) for k, v in tag]
        pairs.append((msgspec.msgpack.encode(field), shape))
        yield bytes([0x80 + len(pairs)]) + b"".join(itertools.chain(*pairs))


@functools.lru_cache(maxsize=2 * len(MSGPACK) + len(JSON))
def made(shape: Callable[[int], bytes], size: int) -> bytes:
    """``shape(size)``, which most parsers are given alike."""
    return shape(size)


def inputs(parser: Parser) -> Iterator[tuple[str, bytes]]:
    """Hostile texts for ``parser``, at most ``parser.limit`` bytes long."""
    for name, shape in (JSON if parser.is_json else MSGPACK).items():
        yield name, shape(WHOLE) if parser.limit == WHOLE else made(shape, parser.limit)
        if parser.type is None or parser.is_json:
            continue
        text = made(shape, parser.limit - 200)
        for struct_type in structs_in(parser.type):
            for number, message in enumerate(placed(struct_type, text)):
                yield f"{name} in field {number} of {struct_type.cls.__name__}", message


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def outcome(parser: Parser, text: bytes) -> None:
    """Parses; an error of another kind than the parser's own fails the test."""
    with contextlib.suppress(parser.error):
        parser.parse(text)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_no_shape_takes_much_longer_than_an_honest_text(parser: Parser) -> None:
    decode: Callable[[bytes], Any]
    if parser.is_json:
        honest, decode = honest_json(parser.limit), json.loads
    elif parser.type is None:
        honest, decode = honest_payload(parser.limit), lambda data: unpack(data, 1 << 40)
    else:
        honest, decode = honest_msgpack(parser.limit), msgspec.msgpack.decode
    # The least of several: other programs slow a run, never speed it up. A call has a least cost.
    allowed = MOST * max(min(seconds(lambda: decode(honest)) for _ in range(5)), 20e-6)
    slow = []
    for name, text in inputs(parser):
        took = seconds(lambda text=text: outcome(parser, text))
        if took > allowed:
            took = min(seconds(lambda text=text: outcome(parser, text)) for _ in range(3))
        if took > allowed:
            slow.append(f"{name}: {len(text)} bytes take {took / allowed * MOST:.0f} times as long")
    assert not slow


OWN = "a file that only this user writes, or what this process wrote"
ELSEWHERE = {
    "backends/mpi.py": "messages of MPI's own network, which has no strangers",
    "cli/bench/crew.py": "its own child's lines",
    "cli/bench/placement.py": "facts of a benchmark's ranks",
    "cli/notebook.py": "its own command's summary; values of a job by `checkpoint/state.py`",
    "cluster/code_store/job_folders.py": OWN,
    "cluster/code_store/store.py": OWN,
    "cluster/home/node_state.py": OWN,
    "cluster/jobs/history.py": OWN,
    "cluster/jobs/ledger.py": OWN,
    "cluster/jobs/log.py": OWN,
    "cluster/jobs/summary.py": "`wire.format.decoded`",
    "cluster/jobs/shim.py": "its agent's arguments",
    "cluster/launching.py": "`tests/unit/cli/test_launch.py`: a line of its own launcher",
    "cluster/sharing/offers.py": OWN,
    "cluster/trust/admission_file.py": OWN,
    "cluster/trust/secret.py": OWN,
    "cluster/trust/known_nodes.py": OWN,
    "cluster/trust/worker_home.py": OWN,
    "engine/shm/channel.py": "an offer of at most 254 bytes",
    "services/node.py": OWN,
    "torch/planning.py": OWN,
    # The search stands for these: the same decoder with another small struct.
    "backends/store_rendezvous.py": "`wire.format.decoded`",
    "backends/torchdist/store.py": "`wire.format.decoded`",
    "training/planner/measured.py": "`wire.format.decoded`",
    "cluster/environments/making.py": "a note of this machine's own",
    "cluster/data_sets/outlines.py": "`wire.format.decoded`",
    "cluster/data_sets/scan.py": "a cache of this machine's own",
    "cluster/data_sets/sets.py": "a record of this machine's own",
    "data/shared.py": "a list that this machine's own agent wrote",
    "cluster/trust/pairing.py": "`wire.format.decoded`, of what a pairing key has sealed",
}
SEARCHED = {
    "checkpoint/manifest.py",
    "checkpoint/state.py",
    "cluster/content/package.py",
    "cluster/environments/plan.py",
    "parameter_server/log.py",
    "services/channel.py",
    "transport/delegation.py",
    "wire/broker.py",
    "wire/format.py",
    "wire/frames.py",
    "wire/payload.py",
}


def decodes(source: Path) -> bool:
    text = source.read_text()
    if not any(word in text for word in ("Decoder", "decode", "loads")):
        return False
    called = {
        ast.unparse(each.func) for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)
    }
    return any(
        re.fullmatch(r"msgspec\.(msgpack|json)\.(Decoder|decode)|Decoder|json\.loads", each)
        for each in called
    )


def test_each_file_with_a_decoder_is_searched_or_says_why_not() -> None:
    root = Path(potluck.__file__).parent
    found = {
        path.relative_to(root).as_posix().removeprefix("_core/")
        for path in root.rglob("*.py")
        if decodes(path)
    }
    assert found == SEARCHED | set(ELSEWHERE)
