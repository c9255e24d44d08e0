"""``Holders``: which node a service's name belongs to, for the programs of this home.

Any member may offer any name. So the first node that a program here reached under a name keeps it:
while the program there is down, nobody else answers for it. ``home/service_names.json`` (mode
0600).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import locked, read_private, replace_private
from potluck.errors import ConfigurationError

FILE = "service_names.json"
MAX_NAMES = 4096

_WHAT = "the list of services and their nodes"


class Holders:
    """The names in ``home``. Threads and processes may use one home at the same time.
    ConfigurationError if the file is damaged."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE

    def of(self, name: str) -> str:
        """The node that ``name`` belongs to; empty if it belongs to none yet."""
        return self._read().get(name, "")

    def keep(self, name: str, node: str) -> None:
        """``name`` belongs to ``node`` from now on. Of more than ``MAX_NAMES`` the one given first
        is forgotten."""
        if self.of(name) == node:
            return
        with locked(self._path.with_name(f".{FILE}.lock"), _WHAT):
            kept = {each: its for each, its in self._read().items() if each != name}
            kept[name] = node
            newest = dict(list(kept.items())[-MAX_NAMES:])
            replace_private(self._path, _WHAT, msgspec.json.encode(newest))

    def _read(self) -> dict[str, str]:
        try:
            data = read_private(self._path, _WHAT, max_bytes=4 << 20)
            return msgspec.json.decode(data, type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{_WHAT} {self._path} is damaged: {error}. Remove it; then each name belongs to "
                "the node that answers next"
            ) from error
