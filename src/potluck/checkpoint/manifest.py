"""The manifest of a checkpoint: its files, with hashes of each file and each tensor.

A manifest is JSON with a hash of itself (*sealed*). In a sharded checkpoint each rank seals the
description of its part in the same way, so that rank 0 can write the manifest without reading the
parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from potluck.checkpoint.state import Entry, decode_entries, digest
from potluck.errors import CheckpointError

FORMAT = 2
MAX_BYTES = 64 << 20


class File(msgspec.Struct, frozen=True):
    """One file of a checkpoint: its name without a directory, its size in bytes, its hash, and the
    hash of each tensor in it."""

    file: Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00]+\Z")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha3_256: str
    tensors: dict[str, str]


class Manifest(msgspec.Struct, frozen=True):
    """The manifest of the checkpoint of ``step``; ``facts`` describe the world that wrote it."""

    format: int
    step: int
    facts: dict[str, Any]
    parts: Annotated[list[File], msgspec.Meta(min_length=1)]


Sealed = TypeVar("Sealed", File, Manifest)


def describe(file: str, data: bytes, entries: dict[str, Entry]) -> File:
    """The manifest's entry of the file that holds ``entries`` as ``data``."""
    hashes = {name: entry.sha3_256() for name, entry in entries.items()}
    return File(file, len(data), digest(data), hashes)


def seal(sealed: File | Manifest) -> bytes:
    """``sealed`` as JSON with its own hash."""
    body = msgspec.to_builtins(sealed)
    return json.dumps({"manifest": body, "sha3_256": _hash(body)}, indent=1).encode()


def unseal(data: bytes, path: Path, kind: type[Sealed]) -> Sealed:
    """The inverse of ``seal``, for the content ``data`` of ``path``. CheckpointError if the data is
    damaged or has another format."""
    try:
        sealed = json.loads(data)
        body: dict[str, Any] = sealed["manifest"]
        if sealed["sha3_256"] != _hash(body):
            raise CheckpointError(f"{path} is damaged: its content does not match its hash")
        if kind is Manifest and body["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {body['format']}; this version of potluck reads {FORMAT}"
            )
        return msgspec.convert(body, kind)
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error!r:.200}") from error


def damage(data: bytes, hashes: dict[str, str]) -> str:
    """A description of the damage in a file whose hash is wrong: a tensor of it, or its header."""
    try:
        _, entries = decode_entries(data)
    except CheckpointError as error:
        return str(error)
    bad = [name for name, entry in entries.items() if hashes.get(name) != entry.sha3_256()]
    return f"tensor {bad[0]!r} has the wrong hash" if bad else "its header has the wrong hash"


def _hash(body: Any) -> str:
    return digest(json.dumps(body, indent=1).encode())
