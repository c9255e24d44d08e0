"""A page of the wheels that pip's own configuration offers in local folders, with their hashes.

pip prefers a wheel whose hash it knows before it has read it. An index tells hashes, a folder does
not, so with a lock a folder's build of torch for the CPU would lose to the index's build with CUDA,
which is gigabytes. This page (for `pip install --find-links PAGE`) tells the hashes of the wheels
in folders that are named by `find-links`, if requirements.lock has them. pip chooses among them as
among those of an index, and checks the hash of what it takes.

`find_links.py` prints the page for the pip of the Python that runs this file.
"""

from __future__ import annotations

import ast
import hashlib
import html
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lockfile import locked, name_of


def configured(listed: str) -> Iterator[Path]:
    """The folders that `find-links` names in the output of `pip config list`."""
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.endswith(".find-links"):
            for place in ast.literal_eval(value).split():
                if place.startswith("file:"):
                    place = unquote(urlsplit(place).path)
                path = Path(place).expanduser()
                if path.is_dir():  # not the address of a page
                    yield path.absolute()


def pinned(wheel: Path, pins: dict[str, list[str]]) -> str:
    """The SHA-256 of ``wheel`` if it is the release that the lock pins and the lock has its hash,
    else ""."""
    name, version, *_ = wheel.name.split("-")
    wanted = [pin for pin in pins.get(name_of(name), []) if f"=={version.split('+')[0]} " in pin]
    if not wanted:
        return ""  # before hundreds of megabytes are read
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest if any(f"sha256:{digest}" in pin for pin in wanted) else ""


def page(folders: Iterable[Path], pins: dict[str, list[str]]) -> str:
    """The page (HTML); each wheel once."""
    wheels = sorted({wheel for folder in folders for wheel in folder.glob("*.whl")})
    links = ((wheel, pinned(wheel, pins)) for wheel in wheels)
    return "<!DOCTYPE html>\n" + "".join(
        f'<a href="{html.escape(wheel.as_uri())}#sha256={digest}">{html.escape(wheel.name)}</a>\n'
        for wheel, digest in links
        if digest
    )


if __name__ == "__main__":
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    print(page(configured(listed), locked()), end="")
