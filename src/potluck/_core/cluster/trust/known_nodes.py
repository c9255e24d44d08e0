"""The nodes that this node has met: their names, and when they were last seen.

The file ``home/known_nodes.json`` (mode 0600) is shared by the agent and the commands. It gives no
rights: who is in the cluster is in ``admission_file.py``. It lets people name a node
(``names.find_node``).
"""

from __future__ import annotations

import contextlib
import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import locked, read_private, replace_private
from potluck._core.cluster.names import NODE_ID_DIGITS
from potluck._core.wire.format import MachineName
from potluck.errors import IdentityError

KNOWN_FILE = "known_nodes.json"
FORMAT = 1
MAX_NODES = 1024
MAX_NAME = 64

_LOCK_FILE = ".known_nodes.lock"
_WHAT = "the list of nodes that were met"


class KnownNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``first`` and ``last`` are the Unix times of the first and the last meeting."""

    node: str
    name: MachineName = ""
    key: str = ""
    first: float = 0.0
    last: float = 0.0


class _File(msgspec.Struct, frozen=True):
    version: int
    nodes: tuple[KnownNode, ...]


class KnownNodes:
    """The nodes in ``home/known_nodes.json``, at most ``MAX_NODES``: the ones that were not seen
    for the longest time are forgotten. Threads and processes may use one home at the same time.

    Every method raises IdentityError if the file is damaged or can be changed by others.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / KNOWN_FILE
        self._lock = threading.Lock()

    def nodes(self) -> tuple[KnownNode, ...]:
        """All nodes in the file now."""
        with self._lock:
            return tuple(self._read().values())

    def name(self, node: str) -> str:
        """The name that ``node`` last gave for itself; empty if it was never met."""
        return next((each.name for each in self.nodes() if each.node == node), "")

    def meet(self, node: str, name: str = "", key: bytes = b"") -> None:
        """Record that ``node`` has proved its ``key`` just now. Writes to the disk."""
        _check(node)
        now = time.time()
        with self._changing() as nodes:
            known = nodes.get(node) or KnownNode(node=node, first=now)
            nodes[node] = msgspec.structs.replace(
                known, name=name[:MAX_NAME] or known.name, key=key.hex() or known.key, last=now
            )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, KnownNode]]:
        """The nodes as a dict to change, written to the file if the block raises no exception. One
        process at a time."""
        with locked(self.path.with_name(_LOCK_FILE), _WHAT), self._lock:
            nodes = self._read()
            yield nodes
            oldest_first = sorted(nodes.values(), key=lambda each: each.last)
            file = _File(FORMAT, tuple(oldest_first[-MAX_NODES:]))
            data = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
            replace_private(self.path, _WHAT, data)

    def _read(self) -> dict[str, KnownNode]:
        try:
            file = msgspec.json.decode(read_private(self.path, _WHAT), type=_File)
        except FileNotFoundError:
            return {}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise IdentityError(
                f"{_WHAT} {self.path} is damaged ({error}): remove the file; it gives no rights"
            ) from error
        if file.version != FORMAT:
            raise IdentityError(
                f"{_WHAT} {self.path} has format {file.version}, this potluck reads {FORMAT}: "
                "install the version that wrote it"
            )
        return {each.node: each for each in file.nodes}


def _check(node: str) -> None:
    if len(node) != NODE_ID_DIGITS or not set(node) <= set(string.hexdigits.lower()):
        raise ValueError(f"{node!r} is no node id ({NODE_ID_DIGITS} hexadecimal digits)")
