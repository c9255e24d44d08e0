"""potluck itself as a wheel, made of the installed files: each machine brings its own, which fits.

A checkout has no wheel, and an installed package has lost its own. What is made here has the
package's files, native core included, and its metadata.
"""

from __future__ import annotations

import importlib.metadata
import io
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

_TIME = (1980, 1, 1, 0, 0, 0)


def own_wheel() -> tuple[str, bytes]:
    """The name of the wheel's file, and the wheel, about 5 MB; the same bytes for the same
    installation. Takes about 50 ms."""
    package = Path(__file__).parents[3]
    files = sorted(
        (f"potluck/{path.relative_to(package).as_posix()}", path.read_bytes())
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    return repacked("potluck", files)


def repacked(name: str, files: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """The installed distribution ``name`` as a wheel of ``files`` (paths in site-packages, and
    contents) and its metadata: the name of the wheel's file, and the wheel."""
    found = importlib.metadata.distribution(name)
    stem = f"{name.replace('-', '_')}-{found.version}"
    info = f"{stem}.dist-info"
    entry_points = found.read_text("entry_points.txt")
    written = [
        *files,
        (f"{info}/METADATA", (found.read_text("METADATA") or "").encode()),
        (
            f"{info}/WHEEL",
            b"Wheel-Version: 1.0\nGenerator: potluck\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        ),
        *([(f"{info}/entry_points.txt", entry_points.encode())] if entry_points else []),
    ]
    record = "".join(f"{line}\n" for line in _record(written)) + f"{info}/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, data in [*written, (f"{info}/RECORD", record.encode())]:
            archive.writestr(zipfile.ZipInfo(path, _TIME), data)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def _record(files: list[tuple[str, bytes]]) -> Iterator[str]:
    for path, data in files:
        digest = urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
        yield f"{path},sha256={digest},{len(data)}"
