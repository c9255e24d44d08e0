"""The manifest of a checkpoint: which files it is made of, and the hashes of all that is in them.

A manifest is JSON beside a hash of itself. Each rank that writes a part seals what it wrote in the
same way, so that the rank that writes the manifest need not read the parts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from potluck.checkpoint.state import Entry, decode_entries
from potluck.errors import CheckpointError

FORMAT = 2
MAX_BYTES = 64 << 20


class File(msgspec.Struct, frozen=True):
    """One file of a checkpoint: its plain name, its size, and the hashes of all of it and of each
    tensor in it."""

    file: Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00]+\Z")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha3_256: str
    tensors: dict[str, str]


class Manifest(msgspec.Struct, frozen=True):
    """The checkpoint of ``step``; ``facts`` are those of the world that wrote it."""

    format: int
    step: int
    facts: dict[str, Any]
    parts: Annotated[list[File], msgspec.Meta(min_length=1)]


Sealed = TypeVar("Sealed", File, Manifest)


def describe(file: str, data: bytes, entries: dict[str, Entry]) -> File:
    """What a manifest says of one file that holds ``entries`` as ``data``."""
    hashes = {name: entry.sha3_256() for name, entry in entries.items()}
    return File(file, len(data), hashlib.sha3_256(data).hexdigest(), hashes)


def seal(sealed: File | Manifest) -> bytes:
    """``sealed`` as JSON, with a hash of itself."""
    body = msgspec.to_builtins(sealed)
    return json.dumps({"manifest": body, "sha3_256": _hash(body)}, indent=1).encode()


def unseal(data: bytes, path: Path, kind: type[Sealed]) -> Sealed:
    """What ``seal`` made ``data`` of; CheckpointError if it is damaged, or of another format."""
    try:
        sealed = json.loads(data)
        body: dict[str, Any] = sealed["manifest"]
        if sealed["sha3_256"] != _hash(body):
            raise CheckpointError(f"{path} is damaged: it does not have the hash it names")
        if kind is Manifest and body["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {body['format']}; this potluck reads {FORMAT}"
            )
        return msgspec.convert(body, kind)
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error!r:.200}") from error


def damage(data: bytes, hashes: dict[str, str]) -> str:
    """Which tensors of a file with the wrong hash differ, as far as that can be told."""
    try:
        _, entries = decode_entries(data)
    except CheckpointError as error:
        return str(error)
    bad = [name for name, entry in entries.items() if hashes.get(name) != entry.sha3_256()]
    return f"tensor {bad[0]!r} has the wrong hash" if bad else "its header has the wrong hash"


def _hash(body: Any) -> str:
    return hashlib.sha3_256(json.dumps(body, indent=1).encode()).hexdigest()
