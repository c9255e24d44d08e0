"""``shared``: the folder of a data set that came with the job."""

from __future__ import annotations

import json
import os
from pathlib import Path

from potluck._core.printable import plain
from potluck.errors import DataError


def shared(name: str) -> Path:
    """The folder of the data set that ``potluck run --data NAME=DIR`` brought: on every machine the
    same files. They are not to be changed: on the machine that started the job it is that folder
    itself, on the others the files are read-only.

    Cost: a look at each file. DataError if the job has no data set of this name, or a file of it,
    which the text names, was changed since the job was started.
    """
    sets = json.loads(os.environ.get("POTLUCK_DATA_SETS", "{}"))
    if name not in sets:
        has = f"it has {', '.join(sorted(sets))}" if sets else "it has none"
        raise DataError(
            f"this job has no data set {name!r} ({has}): potluck run --data {name}=DIR SCRIPT"
        )
    folder, files = Path(sets[name]["folder"]), Path(sets[name]["files"])
    stamps = json.loads(files.read_text()) if files.is_file() else {}
    for path, stamp in stamps.items():
        where = plain(str(folder / path))
        try:
            found = os.lstat(folder / path)
        except OSError as error:
            raise DataError(f"{where}, of the data set {name}, is gone: {error}") from error
        if [found.st_ino, found.st_size, found.st_mtime_ns] != stamp:
            raise DataError(
                f"{where}, of the data set {name}, was changed after the job was started: other "
                "machines have what it was before. Start the job again"
            )
    return folder
