"""The trust store: the nodes that this node has met, and the banned nodes.

The file ``home/trust.json`` (mode 0600) is shared by the agent, its workers and the commands.
Changes are atomic and made under a lock; readers notice them at the next connection. A node that
holds the cluster's secret is trusted unless it is banned, so a place on the list of known nodes
gives no rights: the list lets users name a node by the beginning of its id. A ban is permanent:
nodes pass bans on to each other, so a revoked ban would return from a node that still has it.
"""

from __future__ import annotations

import contextlib
import os
import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from potluck import system
from potluck.cluster.home.directory import make_private
from potluck.cluster.home.keyfile import read_private, replace_private
from potluck.errors import ConfigurationError, IdentityError, PotluckError

TRUST_FILE = "trust.json"
FORMAT = 1
NODE_ID_DIGITS = 64
MIN_PREFIX = 8
MAX_NODES = 4096

_LOCK_FILE = ".trust.lock"
_WHAT = "the list of trusted nodes"


class KnownNode(msgspec.Struct, frozen=True, kw_only=True):
    """An entry for one node. ``since`` is the Unix time of the first meeting, or of the ban."""

    node: str
    name: str = ""
    banned: bool = False
    since: float = 0.0
    reason: str = ""


class _File(msgspec.Struct, frozen=True):
    version: int
    nodes: tuple[KnownNode, ...]


class TrustStore:
    """The nodes in ``home/trust.json``. Threads and processes may use one home at the same time.

    Every method raises IdentityError if the file is damaged or can be changed by others.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / TRUST_FILE
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._nodes: dict[str, KnownNode] = {}

    def nodes(self) -> tuple[KnownNode, ...]:
        """All nodes in the file now. Costs one stat if the file has not changed."""
        with self._lock:
            self._refresh()
            return tuple(self._nodes.values())

    def banned(self) -> frozenset[str]:
        """The ids of all banned nodes."""
        return frozenset(each.node for each in self.nodes() if each.banned)

    def objects_to(self, node: str) -> str | None:
        """The reason to refuse ``node`` in a handshake of ``Credentials``, or None to accept it."""
        try:
            with self._lock:
                self._refresh()
                known = self._nodes.get(node)
        except PotluckError as error:  # a list that can't be read must not let a banned node in
            return f"{error}"
        if known is None or not known.banned:
            return None
        because = f" ({known.reason})" if known.reason else ""
        return f"node {node[:12]} is banned from this cluster{because}"

    def find(self, text: str) -> str:
        """The full node id for ``text``: an id, or the beginning of the id of a known node.

        ConfigurationError if ``text`` is too short, unknown or fits several nodes.
        """
        wanted = text.strip().lower()
        if not wanted or not set(wanted) <= set(string.hexdigits):
            raise ConfigurationError(
                f"{text!r} is no node id: write its hexadecimal digits, or at least the first "
                f"{MIN_PREFIX} of them, as `potluck status` shows them"
            )
        if len(wanted) == NODE_ID_DIGITS:
            return wanted
        if not MIN_PREFIX <= len(wanted) < NODE_ID_DIGITS:
            raise ConfigurationError(
                f"{text!r} has {len(wanted)} digits; a node id has {NODE_ID_DIGITS}, of which at "
                f"least the first {MIN_PREFIX} are needed"
            )
        found = [each.node for each in self.nodes() if each.node.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigurationError(f"{text!r} fits {len(found)} nodes: write more of its digits")
        raise ConfigurationError(
            f"no node known here has an id that begins with {wanted}; write all "
            f"{NODE_ID_DIGITS} digits to name one that was never met"
        )

    def meet(self, node: str, name: str = "") -> None:
        """Record that ``node`` has authenticated itself. A banned node stays banned."""
        with self._lock:
            self._refresh()
            known = self._nodes.get(node)
        if known is not None and (known.banned or known.name == name or not name):
            return
        with self._changing() as nodes:
            known = nodes.get(node) or KnownNode(node=node, since=time.time())
            if not known.banned:
                nodes[node] = msgspec.structs.replace(known, name=name or known.name)

    def ban(self, node: str, reason: str = "") -> bool:
        """Refuse ``node`` from now on; False if it was banned already."""
        _check(node)
        with self._changing() as nodes:
            known = nodes.get(node) or KnownNode(node=node)
            nodes[node] = msgspec.structs.replace(
                known, banned=True, since=time.time(), reason=reason[:256]
            )
            return not known.banned

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, KnownNode]]:
        """The nodes as a dict to change, written to the file if the block raises no exception. One
        process at a time."""
        try:
            make_private(self.path.parent)
            lock = os.open(self.path.with_name(_LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise IdentityError(f"{_WHAT} {self.path} can't be changed: {error}") from error
        try:
            system.lock(lock, wait=True)
            with self._lock:
                self._refresh()
                before, nodes = self._nodes, dict(self._nodes)
                yield nodes
                if nodes != before:
                    _forget_oldest(nodes)
                    file = _File(FORMAT, tuple(nodes.values()))
                    data = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
                    replace_private(self.path, _WHAT, data)
                    self._stamp = None
        finally:
            os.close(lock)

    def _refresh(self) -> None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._stamp, self._nodes = None, {}
            return
        stamp = (status.st_mtime_ns, status.st_ino, status.st_mode)
        if stamp == self._stamp:
            return
        try:
            file = msgspec.json.decode(read_private(self.path, _WHAT), type=_File)
        except FileNotFoundError:
            self._stamp, self._nodes = None, {}
            return
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise IdentityError(
                f"{_WHAT} {self.path} is damaged ({error}); restore it, or remove it: banned "
                "nodes are then let in again until they are banned anew"
            ) from error
        if file.version != FORMAT:
            raise IdentityError(
                f"{_WHAT} {self.path} has format {file.version}, this potluck reads {FORMAT}: "
                "install the version that wrote it"
            )
        self._nodes = {each.node: each for each in file.nodes}
        self._stamp = stamp


def _forget_oldest(nodes: dict[str, KnownNode]) -> None:
    """Limit the file to ``MAX_NODES`` nodes, and never remove a ban."""
    spare = sorted((n for n in nodes.values() if not n.banned), key=lambda each: each.since)
    for node in spare[: max(0, len(nodes) - MAX_NODES)]:
        del nodes[node.node]


def _check(node: str) -> None:
    if len(node) != NODE_ID_DIGITS or not set(node) <= set(string.hexdigits.lower()):
        raise ValueError(f"{node!r} is no node id ({NODE_ID_DIGITS} hexadecimal digits)")
