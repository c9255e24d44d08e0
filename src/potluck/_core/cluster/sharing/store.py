"""``<home>/sharing.json`` (mode 0600): the owner's rule and decisions about whose jobs run here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import read_private, replace_private
from potluck._core.cluster.sharing.rules import Kept
from potluck.errors import ConfigurationError

FILE = "sharing.json"
_WHAT = "the list of members whose jobs run here"


class SharingStore:
    """The file in ``home``. An agent does not start while the file is damaged: no decision is lost
    unnoticed."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE

    def read(self) -> Kept:
        """What is kept; the default if there is no file. ConfigurationError if it is damaged."""
        try:
            return msgspec.json.decode(read_private(self._path, _WHAT), type=Kept)
        except FileNotFoundError:
            return Kept()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{_WHAT} {self._path} is damaged: {error}; remove it and decide anew, with "
                "potluck up --run-for"
            ) from error

    def write(self, kept: Kept) -> None:
        """Keep this from now on."""
        data = msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n"
        replace_private(self._path, _WHAT, data)
