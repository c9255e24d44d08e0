"""Which nodes the code packages here came from, so that a node's packages can be deleted.

``origins/PACKAGE`` below the store's root names the nodes whose folder the package is. Two nodes
may have started the same folder: it is both's.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import replace_private


class _Origin(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...] = ()


class Origins:
    """The records in ``folder``, which is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def came_from(self, package: bytes, node: str) -> None:
        """``package`` is a folder of ``node``. Recorded before the package is stored."""
        before = self._read(package)
        self._write(package, _Origin(tuple({*before.nodes, node})))

    def drop(self, package: bytes) -> None:
        """Forget ``package``."""
        self._path(package).unlink(missing_ok=True)

    def disown(self, node: str) -> list[bytes]:
        """Take ``node`` out of all records; the packages that are nobody's any more."""
        left = []
        for path in self._folder.glob("[0-9a-f]*"):
            package = bytes.fromhex(path.name)
            before = self._read(package)
            if node in before.nodes:
                nodes = tuple(each for each in before.nodes if each != node)
                self._write(package, _Origin(nodes))
                if not nodes:
                    left.append(package)
        return left

    def _path(self, package: bytes) -> Path:
        return self._folder / package.hex()

    def _read(self, package: bytes) -> _Origin:
        try:
            return msgspec.json.decode(self._path(package).read_bytes(), type=_Origin)
        except (FileNotFoundError, msgspec.MsgspecError):
            return _Origin()

    def _write(self, package: bytes, origin: _Origin) -> None:
        data = msgspec.json.encode(origin)
        replace_private(self._path(package), "where a script's folder came from", data)
