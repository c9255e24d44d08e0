"""Folders that only their owner may change: the potluck home, and those in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from potluck._core.system import need_posix
from potluck.errors import IdentityError


def make_private(folder: Path) -> Path:
    """``folder``, made with mode 0700 if it is missing; folders on the way to it as well.

    IdentityError as for ``check_private``; OSError if it can't be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """IdentityError, with what to do, if users other than this one and root may change what is in
    ``folder``; nothing if there is no such folder.

    Who may write there can put other keys, bans and programs in the place of this node's, whatever
    the modes of the files. OpenSSH refuses such folders of keys, too.
    """
    need_posix("a folder that only its owner can change")
    try:
        status = os.stat(folder)
    except OSError:
        return  # the file that is looked for there is not there either
    if status.st_uid not in (os.geteuid(), 0):
        raise IdentityError(
            f"{folder} belongs to user {status.st_uid}, who could replace this node's keys there; "
            "point POTLUCK_HOME at a folder of your own"
        )
    if status.st_mode & 0o022:
        raise IdentityError(
            f"{folder} can be changed by other users (mode {stat.S_IMODE(status.st_mode):04o}), "
            f"who could replace this node's keys there; run: chmod go-w {folder}"
        )
