"""Folders that travel to no other machine: the potluck home, and folders with far more than a
script: the user's home folder, folders above it, and folders that all users share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from potluck._core.system import account_home
from potluck.errors import ConfigurationError

NARROWER = (
    "If the script is further below, --root DIR names a smaller folder that holds all it needs"
)
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")


class Private:
    """The potluck home and all that is directly in it, by whatever path, link or hard link."""

    def __init__(self, home: Path) -> None:
        self._known: set[tuple[int, int]] = set()
        if home.is_dir():
            with os.scandir(home) as entries:
                found = [home.stat(), *(entry.stat(follow_symlinks=False) for entry in entries)]
            self._known = {(status.st_dev, status.st_ino) for status in found}

    def has(self, entry: os.DirEntry[str]) -> bool:
        """Whether ``entry``, or what it links to, is there."""
        try:
            status = entry.stat()
        except OSError:  # a link to nothing, or in circles
            return False
        return (status.st_dev, status.st_ino) in self._known


def check_folder(folder: Path, home: Path) -> None:
    """ConfigurationError, with what to do, if ``folder`` may not travel; ``home`` is the potluck
    home."""
    real, private = folder.resolve(), home.resolve()
    if real == private or private in real.parents:
        raise ConfigurationError(
            f"the script is in {folder}, which belongs to potluck's home {home}: nothing of it is "
            "sent to other machines. Copy the script into a folder of its own, and run it there"
        )
    what = _too_much(real)
    if what:
        raise ConfigurationError(
            f"the script is in {folder}, {what}: everything there would be sent to the other "
            "machines with it. Move the script, with the files that it needs, into a folder of its "
            f"own, and run it there. {NARROWER}. Nothing was started"
        )


def check_target(folder: Path, home: Path, *, option: str = "--to") -> None:
    """ConfigurationError that names ``option``, with what to do, if nothing of other machines may
    or can be written into ``folder``: potluck's ``home``, those in which programs look for what
    they run, what is no folder, or not the user's to write."""
    real, private = folder.resolve(), home.resolve()
    if real == private or private in real.parents:
        raise ConfigurationError(
            f"{option} {folder} belongs to potluck's home {home}: give another one"
        )
    if what := _too_much(real):
        raise ConfigurationError(
            f"{option} {folder}, {what}: the files come from other machines, so give a folder of "
            "their own"
        )
    above = next(each for each in (folder, *folder.parents) if each.exists())
    if not above.is_dir():
        raise ConfigurationError(f"{option} {folder}: {above} is no folder; give another one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{option} {folder}: you may not write there")


def _too_much(folder: Path) -> str:
    """What ``folder`` is, if it holds far more than a script; else empty."""
    homes = {Path.home().resolve(), account_home().resolve()}
    if folder in homes:
        return "your home folder"
    if any(folder in each.parents for each in homes):
        return "a folder above your home folder"
    shared = {Path(each).resolve() for each in (*_SHARED, tempfile.gettempdir())}
    if folder in shared or any(folder in each.parents for each in shared):
        return "which all users and programs share"
    return ""
