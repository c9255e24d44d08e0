"""The wheels on this machine: each in a file by its SHA-256, fetched once, checked before its use.

A file appears under its name only whole and checked. What an index sends is never believed: its
length is bounded by the plan's, and other content is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from potluck._core.background import why
from potluck._core.cluster.environments.plan import Wheel, objection_to_host, objection_to_url
from potluck._core.cluster.home.keyfile import make_private
from potluck.errors import ConfigurationError

_AT_ONCE = 4
_SILENCE_S = 30.0
_BLOCK = 1 << 18
_MAX_NAMED = 8

Progress = Callable[[Wheel, int, str], None]
"""``progress(wheel, num_bytes, origin)``: so many more bytes of ``wheel`` came from there."""


class Wheels:
    """The wheels in ``folder``. ``index`` is the package index that this machine's owner named."""

    def __init__(self, folder: Path, index: str) -> None:
        self.folder = folder
        self._index = index
        self._fetching: dict[bytes, asyncio.Lock] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)

    def path(self, wheel: Wheel) -> Path:
        """Where ``wheel`` is, or will be."""
        return self.folder / f"{wheel.sha256.hex()}.whl"

    def missing(self, wheels: Sequence[Wheel]) -> list[Wheel]:
        """Those of ``wheels`` that are not here; the others count as used now."""
        lacking = []
        for wheel in wheels:
            try:
                os.utime(self.path(wheel))
            except OSError:
                lacking.append(wheel)
        return lacking

    def objection(self, wheels: Sequence[Wheel]) -> str:
        """Why these wheels, chosen by another machine, are not fetched; empty if they may be."""
        for wheel in wheels:
            if objection := objection_to_url(wheel.url, own=self._index):
                return f"{wheel.name} {wheel.version} is to come from {wheel.url}: {objection}"
        return ""

    async def fetch(self, wheels: Sequence[Wheel], progress: Progress) -> None:
        """Bring those of ``wheels`` that are not here. Cancelled, it leaves nothing half-made.

        ConfigurationError that names the ones that can't be had, and why: the text follows the name
        of the machine.
        """
        make_private(self.folder)
        missing = self.missing(wheels)
        fetches = (self._fetch(wheel, progress) for wheel in missing)
        done = await asyncio.gather(*fetches, return_exceptions=True)
        lacks: list[str] = []
        reasons: dict[str, None] = {}
        for wheel, error in zip(missing, done, strict=True):
            if error is None:
                continue
            if not isinstance(error, Exception):
                raise error
            lacks.append(f"{wheel.name} {wheel.version}")
            reasons[str(error) or why(error)] = None
        if lacks:
            more = f" and {len(lacks) - _MAX_NAMED} more" if len(lacks) > _MAX_NAMED else ""
            raise ConfigurationError(
                f"lacks {', '.join(lacks[:_MAX_NAMED])}{more}: {'; '.join(list(reasons)[:3])}"
            )

    async def _fetch(self, wheel: Wheel, progress: Progress) -> None:
        lock = self._fetching.setdefault(wheel.sha256, asyncio.Lock())
        try:
            async with lock, self._room:
                if self.missing([wheel]):
                    await self._from_index(wheel, progress)
        finally:
            if not lock.locked():
                self._fetching.pop(wheel.sha256, None)

    async def _from_index(self, wheel: Wheel, progress: Progress) -> None:
        loop, stopped = asyncio.get_running_loop(), threading.Event()
        host = urlsplit(wheel.url).hostname or ""

        def count(num_bytes: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(progress, wheel, num_bytes, host)

        download = _Download(wheel, self.path(wheel), self._index, stopped, count)
        running = asyncio.ensure_future(asyncio.to_thread(download.run))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait([running])
            raise


class _Download:
    """One wheel on its way from its index to the file ``target``; runs in a thread."""

    def __init__(
        self,
        wheel: Wheel,
        target: Path,
        index: str,
        stopped: threading.Event,
        count: Callable[[int], None],
    ) -> None:
        self._wheel = wheel
        self._target = target
        self._index = index
        self._stopped = stopped
        self._count = count

    def run(self) -> None:
        """ConfigurationError if the file can't be had from there."""
        partial = self._target.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            with open(partial, "w+b") as file:
                self._fill(file)
                file.flush()
                os.fsync(file)
            os.replace(partial, self._target)
        finally:
            partial.unlink(missing_ok=True)

    def _fill(self, file: IO[bytes]) -> None:
        wheel, before = self._wheel, -1
        while file.tell() < wheel.size:
            # A connection that broke is taken up where it was, as long as it brings more each time.
            if file.tell() == before:
                raise ConfigurationError(f"{self._host} stopped sending {wheel.file}")
            before = file.tell()
            try:
                self._read(file)
            except urllib.error.HTTPError as error:
                error.close()
                raise ConfigurationError(
                    f"{self._host} answers {error.code} {error.reason} for {wheel.file}"
                ) from error
            except (urllib.error.URLError, OSError, HTTPException) as error:
                if file.tell() == before:
                    reason = getattr(error, "reason", None) or why(error)
                    raise ConfigurationError(f"{self._host} can't be asked: {reason}") from error
        file.seek(0)
        hashed = sha256()
        while block := file.read(_BLOCK):
            hashed.update(block)
        if hashed.digest() != wheel.sha256:
            raise ConfigurationError(
                f"{self._host} gives other content for {wheel.file} than was signed for the job "
                f"(SHA-256 {hashed.hexdigest()[:16]}..., not {wheel.sha256.hex()[:16]}...): refused"
            )

    @property
    def _host(self) -> str:
        return urlsplit(self._wheel.url).netloc

    def _read(self, file: IO[bytes]) -> None:
        """Read one response into ``file``, behind what it has."""
        begin = file.tell()
        request = urllib.request.Request(self._wheel.url, headers={"User-Agent": "potluck"})
        if begin:
            request.add_header("Range", f"bytes={begin}-")
        with _Opener(self._index).open(request, timeout=_SILENCE_S) as response:
            if begin and response.status != 206:
                file.seek(0)
            while block := response.read1(_BLOCK):
                if self._stopped.is_set():
                    raise ConfigurationError("interrupted")
                if file.tell() + len(block) > self._wheel.size:
                    raise ConfigurationError(
                        f"{self._host} gives more than the {self._wheel.size} bytes of "
                        f"{self._wheel.file}: refused"
                    )
                file.write(block)
                self._count(len(block))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows an index to another host only where a plan might have named that."""

    def __init__(self, index: str) -> None:
        self._index = index

    def redirect_request(self, *given: Any) -> urllib.request.Request | None:
        url = given[-1]
        _check(url, self._index)
        return super().redirect_request(*given)


class _Opener(urllib.request.OpenerDirector):
    """Opens http and https alone, at hosts that a plan may name."""

    def __init__(self, index: str) -> None:
        super().__init__()
        self._own = index
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
            _Redirects(index),
        ):
            self.add_handler(handler)

    def open(self, fullurl: Any, *given: Any, **named: Any) -> Any:
        """As the base class does; ConfigurationError for a host that no plan may name."""
        _check(fullurl.full_url, self._own)
        return super().open(fullurl, *given, **named)


def _check(url: str, index: str) -> None:
    """ConfigurationError if ``url`` leads to a host of this machine's network which its owner did
    not name."""
    if objection := objection_to_url(url, own=index):
        raise ConfigurationError(f"{url}: {objection}")
    parts, own = urlsplit(url), urlsplit(index)
    if (parts.hostname, parts.port) == (own.hostname, own.port):
        return
    if parts.scheme in urllib.request.getproxies():
        return  # the proxy looks the name up, and decides
    for found in socket.getaddrinfo(parts.hostname, parts.port or parts.scheme):
        if objection := objection_to_host(str(found[4][0])):
            raise ConfigurationError(f"{url}: {objection}")
