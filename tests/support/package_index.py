"""A package index on the loopback (PEP 503 and 691), which counts what it sends, and has faults.

Its wheels are made here: tiny ones, and the packages of this environment that potluck needs, made
of their installed files, so that tests ask nothing outside.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import http.server
import importlib.metadata
import io
import json
import os
import re
import sys
import sysconfig
import tarfile
import threading
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def tiny_wheel(
    name: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    requires: tuple[str, ...] = (),
    content: bytes = b"",
    module: str = "",
) -> tuple[str, bytes]:
    """A wheel with one module, whose ``VERSION`` is the version, and a file of ``content``: the
    name of the wheel's file, and the wheel."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n{module}".encode(),
        f"{name}/data.bin": content,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
        ),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return f"{name}-{version}-{tag}.whl", buffer.getvalue()


BACKEND = """
import os, pathlib, socket, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, version = pathlib.Path("NAME").read_text().split()
    try:
        pathlib.Path("/usr/share/written").write_text("")
        said = "wrote"
    except OSError:
        said = "read-only"
    links = [link for _, link in socket.if_nameindex() if link != "lo"]
    info, homes = f"{name}-{version}.dist-info", os.environ.get("A_SECRET", "")
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\\nSAW = {(said, links, homes)!r}\\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/RECORD": "",
    }
    file = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{file}", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return file
"""
"""What builds ``tiny_source``, as a module: it writes down what it saw of the machine."""


def tiny_source(name: str, version: str = "1.0") -> tuple[str, bytes]:
    """A source distribution, which the wheel ``tinybackend`` with the module ``BACKEND`` builds."""
    metadata = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
    system = '[build-system]\nrequires = ["tinybackend"]\nbuild-backend = "tinybackend"\n'
    files = {"PKG-INFO": metadata, "pyproject.toml": system, "NAME": f"{name} {version}"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return f"{name}-{version}.tar.gz", buffer.getvalue()


@functools.cache
def installed_wheels() -> dict[str, bytes]:
    """What potluck needs, as wheels made of the files in this environment."""
    waiting, found = ["potluck"], dict[str, bytes]()
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        for line in importlib.metadata.requires(name) or []:
            need = _normal(re.split(r"[^\w.-]", line, maxsplit=1)[0])
            if "extra ==" in line or need in {"uv", *seen}:
                continue
            try:
                distribution = importlib.metadata.distribution(need)
            except importlib.metadata.PackageNotFoundError:
                continue  # for another system, or an older Python
            seen.add(need)
            waiting.append(need)
            found |= dict([_of_installed(distribution)])
    return found


def _of_installed(distribution: importlib.metadata.Distribution) -> tuple[str, bytes]:
    site = Path(sysconfig.get_paths()["purelib"])
    files = []
    for path in distribution.files or []:
        place = Path(str(distribution.locate_file(path))).resolve()
        is_metadata = path.parts[0].endswith(".dist-info")
        if place.is_relative_to(site) and not is_metadata and place.suffix != ".pyc":
            files.append((path.as_posix(), place.read_bytes()))
    name = distribution.metadata["Name"]
    return repacked(name, files)


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
            archive.writestr(zipfile.ZipInfo(path), data)
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def _record(files: list[tuple[str, bytes]]) -> Iterator[str]:
    for path, data in files:
        digest = urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
        yield f"{path},sha256={digest},{len(data)}"


def _metadata(wheel: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("info/METADATA")))


@dataclass
class Index:
    """A running index with ``files`` by name. ``sent`` counts the bytes of each file that were
    sent, ``asked`` the requests for it. ``faults`` by file: ``flip`` (one byte), ``truncate`` (the
    connection ends in the middle), ``stall`` (there, until it is ``released``), ``404``,
    ``endless`` (twice the file). ``yanked`` by file: the reason. ``close()`` ends the index."""

    url: str
    files: dict[str, bytes]
    sent: collections.Counter[str] = field(default_factory=collections.Counter)
    asked: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: dict[str, str] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    close: Callable[[], None] = lambda: None

    def add(self, *wheels: tuple[str, bytes]) -> None:
        self.files |= dict(wheels)

    def page(self, project: str) -> bytes | None:
        """The answer about ``project``; None if there is no such project."""
        files = [
            {
                "filename": name,
                "url": f"../../files/{name}",
                "hashes": {"sha256": hashlib.sha256(data).hexdigest()},
                "size": len(data),
                "core-metadata": name.endswith(".whl"),
                "yanked": self.yanked.get(name, False),
            }
            for name, data in self.files.items()
            if _normal(name.split("-")[0]) == project
        ]
        answer = {"meta": {"api-version": "1.0"}, "name": project, "files": files}
        return json.dumps(answer).encode() if files else None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        index: Index = self.server.index  # type: ignore[attr-defined]
        parts = self.path.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            page = index.page(_normal(parts[1]))
            if page is None:
                self.send_error(404)
                return
            self._answer(200, page, "application/vnd.pypi.simple.v1+json")
        elif parts[0] == "files" and parts[1] in index.files:
            self._file(index, parts[1])
        elif parts[0] == "files" and parts[1].removesuffix(".metadata") in index.files:
            self._answer(200, _metadata(index.files[parts[1][:-9]]), "text/plain")
        else:
            self.send_error(404)

    def _file(self, index: Index, name: str) -> None:
        data, fault = index.files[name], index.faults.get(name, "")
        index.asked[name] += 1
        if fault == "404":
            self.send_error(404)
            return
        if fault == "flip":
            data = (
                data[: len(data) // 2]
                + bytes([data[len(data) // 2] ^ 1])
                + data[len(data) // 2 + 1 :]
            )
        elif fault == "endless":
            data += data
        begin = 0
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin = int(found[1])
            data = data[begin : int(found[2]) + 1 if found[2] else len(data)]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/*")
        self.end_headers()
        is_cut = fault == "stall" or (fault == "truncate" and not begin)
        half = len(data) // 2 if is_cut else len(data)
        self.wfile.write(data[:half])
        index.sent[name] += half
        if fault == "stall":
            self.wfile.flush()
            index.released.wait(600)
        if half < len(data):
            self.close_connection = True

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def package_index(
    host: str = "127.0.0.1", port: int = 0, *, with_installed: bool = True
) -> Iterator[Index]:
    """An index at ``host``, by default with what potluck needs."""
    server = _Server((host, port), _Handler)
    files = dict(installed_wheels()) if with_installed else {}
    index = Index(f"http://{host}:{server.server_address[1]}/simple", files)
    server.index = index  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, name="package-index")

    def close() -> None:
        index.released.set()
        server.shutdown()
        server.server_close()
        thread.join()

    index.close = close
    thread.start()
    try:
        yield index
    finally:
        close()


def serve(host: str, port: int, words: list[str]) -> None:
    """An index for other processes, with faults (``file=fault``), packages of so many megabytes
    (``name:8``), and the wheels at these paths: says its URL, and, for each line on stdin, how many
    bytes of each file it has sent. The line ``release`` ends all faults."""
    with package_index(host, port) as index:
        index.add(tiny_wheel("foo"), tiny_wheel("large", content=bytes(8 << 20)))
        index.faults |= dict(word.split("=", 1) for word in words if "=" in word)
        for name, size in (word.split(":") for word in words if ":" in word):
            index.add(tiny_wheel(name, content=os.urandom(int(size) * 1_000_000)))
        for wheel in (Path(word) for word in words if word.endswith(".whl")):
            index.add((wheel.name, wheel.read_bytes()))
        print("index:", index.url, flush=True)
        for line in sys.stdin:
            if line.strip() == "release":
                index.faults.clear()
                index.released.set()
            sizes = {name: len(data) for name, data in index.files.items()}
            print("sent:", json.dumps({"sent": index.sent, "sizes": sizes}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
