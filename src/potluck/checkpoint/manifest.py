"""The manifest of a checkpoint: which files it is made of, and the hashes of all that is in them.

A manifest is JSON beside a hash of itself. Each rank that writes a part seals what it wrote in the
same way, so that the rank that writes the manifest need not read the parts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from potluck.checkpoint.state import Entry, decode_entries
from potluck.errors import CheckpointError

FORMAT = 2
MAX_BYTES = 64 << 20


def describe(file: str, data: bytes, entries: dict[str, Entry]) -> dict[str, Any]:
    """What a manifest says of one file that holds ``entries`` as ``data``."""
    return {
        "file": file,
        "bytes": len(data),
        "sha3_256": hashlib.sha3_256(data).hexdigest(),
        "tensors": {name: entry.sha3_256() for name, entry in entries.items()},
    }


def make(step: int, parts: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the checkpoint of ``step`` that consists of ``parts``."""
    return {"format": FORMAT, "step": step, "facts": facts, "parts": parts}


def seal(body: dict[str, Any]) -> bytes:
    """``body`` as JSON, with a hash of itself."""
    return json.dumps({"manifest": body, "sha3_256": _hash(body)}, indent=1).encode()


def unseal(data: bytes, path: Path) -> dict[str, Any]:
    """The manifest in ``data``, which may be damaged: then CheckpointError."""
    body = _open(data, path)
    try:
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {body['format']}; this potluck reads {FORMAT}"
            )
        if not isinstance(body["step"], int) or not isinstance(body["facts"], dict):
            raise TypeError("step is no number or facts are none")
        if not isinstance(body["parts"], list) or not body["parts"]:
            raise TypeError("it lists no files")
        for part in body["parts"]:
            _check_part(part)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error!r:.200}") from error
    return body


def unseal_part(data: bytes, path: Path) -> dict[str, Any]:
    """What one rank has sealed of its part; CheckpointError if it is damaged."""
    part = _open(data, path)
    try:
        _check_part(part)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} describes no part: {error!r:.200}") from error
    return part


def damage(data: bytes, hashes: dict[str, str]) -> str:
    """Which tensors of a file with the wrong hash differ, as far as that can be told."""
    try:
        _, entries = decode_entries(data)
    except CheckpointError as error:
        return str(error)
    bad = [name for name, entry in entries.items() if hashes.get(name) != entry.sha3_256()]
    return f"tensor {bad[0]!r} has the wrong hash" if bad else "its header has the wrong hash"


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha3_256(json.dumps(body, indent=1).encode()).hexdigest()


def _open(data: bytes, path: Path) -> dict[str, Any]:
    try:
        sealed = json.loads(data)
        body: dict[str, Any] = sealed["manifest"]
        if sealed["sha3_256"] != _hash(body):
            raise CheckpointError(f"{path} is damaged: it does not have the hash it names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error!r:.200}") from error
    return body


def _check_part(part: dict[str, Any]) -> None:
    if not isinstance(part["bytes"], int) or part["bytes"] < 0:
        raise TypeError("bytes is no length")
    if not isinstance(part["file"], str) or Path(part["file"]).name != part["file"]:
        raise TypeError("file is no plain name")
    if not isinstance(part["tensors"], dict) or not isinstance(part["sha3_256"], str):
        raise TypeError("tensors or sha3_256 are impossible")
