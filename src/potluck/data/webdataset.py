"""Tar archives in the layout of WebDataset: each archive is a shard."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck._core.waiting import Reminder, reminding
from potluck.data.shards import Deferred, ListedFile, Paths, ShardedDataset, find_files
from potluck.data.shared import arrived
from potluck.errors import DataError


@dataclass(frozen=True, slots=True)
class _Sample(Deferred):
    archive: ListedFile
    key: str
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)  # offset and size in the file

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = {"__key__": self.key}
        path = self.archive.path
        try:
            with path.open("rb") as file:
                self.archive.check(file.fileno())
                for extension, (offset, size) in self.parts.items():
                    file.seek(offset)
                    found[extension] = file.read(size)
                    if len(found[extension]) < size:
                        raise DataError(f"{path} is cut off in {self.key}.{extension}")
        except OSError as error:
            raise DataError(f"{path} can't be read: {error}") from error
        return found


class WebDatasetFiles(ShardedDataset):
    """Uncompressed tar archives: files with the same name up to the first dot are one sample.

        data = WebDatasetFiles("data/train-*.tar", transform=decode)

    A sample is a dict from extensions to bytes, for the files ``000017.jpg`` and ``000017.cls``
    ``{"__key__": "000017", "jpg": b"...", "cls": b"3"}``; ``transform`` decodes it. The headers of
    all archives are read at the start (the archives keep no index), the bytes of a sample when it
    is needed.

    DataError for an archive that is compressed, cut off or damaged, or changed later.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        lanes: int = 8,
    ) -> None:
        self._files = find_files(paths, ".tar")
        self._samples: list[list[_Sample]] = []
        done = self._samples
        listing = Reminder(lambda: f"listing archives: {len(done)} of {len(self._files)}")
        with reminding(listing):
            for path in self._files:
                self._samples.append(_listed(path))
        super().__init__(list(map(len, self._samples)), transform=transform, lanes=lanes)

    def read(self, shard: int) -> Sequence[Deferred]:
        arrived(self._files[shard])
        return self._samples[shard]

    def describe(self, shard: int) -> str:
        return str(self._files[shard])


def _listed(path: Path) -> list[_Sample]:
    """The samples of an archive, in its order."""
    samples: dict[str, _Sample] = {}
    try:
        at = arrived(path, outline=True)
        with at.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            source = ListedFile.of(path, at, file.fileno())
            size = os.fstat(file.fileno()).st_size
            for member in archive:
                if not member.isfile():
                    continue
                if member.offset_data + member.size > size:
                    raise DataError(f"{path} is cut off in {member.name}")
                folder, slash, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not stem or not dot:
                    continue
                key = folder + slash + stem
                sample = samples.setdefault(key, _Sample(source, key))
                if extension in sample.parts:
                    raise DataError(f"{path} has {member.name} twice")
                sample.parts[extension] = (member.offset_data, member.size)
            # tarfile takes a damaged header for the end, which is a block of zeros.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0") or archive.offset >= size:
                last = archive.getnames()[-1]
                raise DataError(f"{path} is damaged or cut off after {last}")
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} can't be read as an uncompressed tar archive: {error}") from error
    return list(samples.values())
