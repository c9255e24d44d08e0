"""The wheels on this machine: by SHA-256, from the machines of the cluster that have them, else
from the package index, which each byte leaves once for all machines that fetch it at one time.

Nothing that is sent is believed: the content store checks the SHA-256 that was signed with the job
(``content.store.ContentStore.fetch_file``).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
)
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from potluck._core.background import why
from potluck._core.cluster.content.package import Package, whole_file
from potluck._core.cluster.content.shelf import Kept, Shelf
from potluck._core.cluster.content.store import ContentStore, Terms
from potluck._core.cluster.environments.plan import (
    Wheel,
    is_known_host,
    objection_to_host,
    objection_to_url,
)
from potluck.errors import ConfigurationError, LinkError, PotluckError

_AT_ONCE = 4
_SILENCE_S = 30.0
_BLOCK = 1 << 18
_MAX_NAMED = 8
_OUTSIDE = "the source outside of the cluster"
"""What the content store calls the index."""

Progress = Callable[[Wheel, int, str], None]
"""``progress(wheel, num_bytes, origin)``: so many more bytes of ``wheel`` came from there."""


class Wheels:
    """The wheels in the content store of ``home``. ``index`` is the package index that this
    machine's owner named; they take at most ``quota`` bytes."""

    def __init__(
        self,
        home: Path,
        index: str,
        quota: int,
        content: ContentStore | None,
        called: Callable[[str], str],
    ) -> None:
        """Without the agent's ``content`` store nothing is fetched. ``called(node)`` is the name of
        a node for people."""
        self._index = index
        self._content = content
        self._called = called
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._shelf = Shelf(home / "content" / "wheel")
        if content is not None:
            terms = Terms(may_have=lambda node, package: True, quota=quota)
            self._shelf = content.open("wheel", terms)

    def path(self, wheel: Wheel) -> Path:
        """Where ``wheel`` is, or will be; nobody may write to it."""
        return self._shelf.path_of(_package(wheel).contents[0])

    def name(self, wheel: Wheel) -> str:
        """The name of ``wheel`` in the content store, hexadecimal."""
        return _package(wheel).name.hex()

    def missing(self, wheels: Sequence[Wheel]) -> list[Wheel]:
        """Those of ``wheels`` that are not here; the others count as used now."""
        lacking = []
        for wheel in wheels:
            package = _package(wheel)
            if not self._shelf.has(package.contents[0]):
                lacking.append(wheel)
            elif known := self._shelf.package(package.name):
                self._shelf.keep(known)
        return lacking

    def kept(self) -> list[Kept]:
        """What is here, the wheel used last first."""
        return self._shelf.packages()

    def remove(self, name: bytes) -> bool:
        """Remove a wheel of ``kept``, unless it is held, or another process fetches or uses any;
        whether it was removed."""
        if self._content is not None:
            return bool(self._content.delete("wheel", [name]))
        with self._shelf.locked(shared=False) as is_alone:
            if is_alone:
                self._shelf.forget(name)
                self._shelf.sweep()
            return is_alone

    @contextlib.contextmanager
    def held(self, wheels: Sequence[Wheel]) -> Iterator[None]:
        """The store keeps ``wheels`` meanwhile."""
        assert self._content is not None, "only an agent makes environments"
        names = [_package(wheel).name for wheel in wheels]
        with self._shelf.locked(shared=True):
            for name in names:
                self._content.hold("wheel", name)
            try:
                yield
            finally:
                for name in names:
                    self._content.release("wheel", name)

    def objection(self, wheels: Sequence[Wheel]) -> str:
        """Why these wheels, chosen by another machine, are not fetched; empty if they may be."""
        for wheel in wheels:
            if objection := objection_to_url(wheel.url, own=self._index):
                return f"{wheel.name} {wheel.version} is to come from {wheel.url}: {objection}"
        return ""

    async def fetch(self, wheels: Sequence[Wheel], progress: Progress) -> None:
        """Bring those of ``wheels`` that are not here. What came before a cancellation, or the end
        of this process, is not fetched again.

        ConfigurationError that names the ones that can't be had, and why: the text follows the name
        of the machine.
        """
        missing = self.missing(wheels)
        # Of its own: a silent index must not take the threads that write the agent's state.
        pool = ThreadPoolExecutor(4 * _AT_ONCE, thread_name_prefix="potluck-index")
        try:
            fetches = (self._fetch(wheel, progress, pool) for wheel in missing)
            done = await asyncio.gather(*fetches, return_exceptions=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        lacks: list[str] = []
        reasons: dict[str, None] = {}
        for wheel, error in zip(missing, done, strict=True):
            if error is None:
                continue
            if not isinstance(error, PotluckError | OSError):
                raise error
            lacks.append(f"{wheel.name} {wheel.version}")
            host = urlsplit(wheel.url).netloc
            reason = str(error).replace(_OUTSIDE, host)
            reasons[reason.replace("(: ", "(").replace(", : ", ", ")] = None
        if lacks:
            more = f" and {len(lacks) - _MAX_NAMED} more" if len(lacks) > _MAX_NAMED else ""
            raise ConfigurationError(
                f"lacks {', '.join(lacks[:_MAX_NAMED])}{more}: {'; '.join(list(reasons)[:3])}"
            )

    async def _fetch(self, wheel: Wheel, progress: Progress, pool: Executor) -> None:
        assert self._content is not None, "only an agent makes environments"
        host = urlsplit(wheel.url).hostname or ""

        def came(num_bytes: int, node: str) -> None:
            progress(wheel, num_bytes, self._called(node) if node else host)

        async with self._room:
            await self._content.fetch_file(
                "wheel",
                wheel.sha256,
                wheel.size,
                outside=partial(self._from_index, pool, wheel),
                on_progress=came,
            )

    async def _from_index(
        self, pool: Executor, wheel: Wheel, begin: int, count: int
    ) -> AsyncIterator[bytes]:
        """``count`` bytes of ``wheel``, from ``begin`` on, as its index sends them. LinkError if it
        does not."""
        host, response = urlsplit(wheel.url).netloc, None
        in_thread = partial(asyncio.get_running_loop().run_in_executor, pool)
        try:
            response = await in_thread(self._open, wheel, begin, count)
            # A server without ranges sends all from the beginning.
            skip = begin if response.status != 206 else 0
            while count:
                block = await in_thread(response.read1, min(_BLOCK, skip or count))
                if not block:
                    raise LinkError(f"{host} stopped sending {wheel.file}")
                if skip:
                    skip -= len(block)
                else:
                    count -= len(block)
                    yield block
        except urllib.error.HTTPError as error:
            error.close()
            text = f"{host} answers {error.code} {error.reason} for {wheel.file}"
            raise LinkError(text) from error
        except (OSError, HTTPException, ValueError) as error:  # ValueError: an odd host or path
            reason = getattr(error, "reason", None) or why(error)
            raise LinkError(f"{host} can't be asked: {reason}") from error
        finally:
            if response is not None:
                _cut_off(response)

    def _open(self, wheel: Wheel, begin: int, count: int) -> HTTPResponse:
        headers = {"User-Agent": "potluck", "Range": f"bytes={begin}-{begin + count - 1}"}
        request = urllib.request.Request(wheel.url, headers=headers)
        opener = urllib.request.build_opener(_Connects(self._index))
        response: HTTPResponse = opener.open(request, timeout=_SILENCE_S)
        return response


def _cut_off(response: HTTPResponse) -> None:
    """Close ``response``, from which a thread may still be reading: its wait ends first, which
    ``close`` would wait for, too, up to ``_SILENCE_S``."""
    raw = getattr(getattr(response.fp, "raw", None), "_sock", None)
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
    response.close()


def _package(wheel: Wheel) -> Package:
    return whole_file(wheel.sha256, wheel.size)


class _Connects(
    urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler
):
    """Connects to public hosts, the index that this machine's owner named, and the proxies. Follows
    an index to another host only where a plan might have named that."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self._own = own

    def redirect_request(self, *given: Any) -> urllib.request.Request | None:
        if objection := objection_to_url(given[-1], own=self._own):
            raise ConfigurationError(f"{given[-1]}: {objection}")
        return super().redirect_request(*given)

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._made, _Http), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._made, _Https), request)

    def _made(self, kind: type[_Http], host: str, /, **given: Any) -> _Http:
        made = kind(host, **given)
        proxies = urllib.request.getproxies()
        for url in (self._own, proxies.get("http", ""), proxies.get("https", "")):
            each = urlsplit(f"//{url.partition('//')[2] or url}")
            made.named.add((each.hostname, each.port or made.default_port))
        if is_known_host(f"https://{host}") and kind is _Https:
            made.named.add((made.host, made.port))  # TLS proves who answers there
        return made


class _Http(HTTPConnection):
    """Asks for the addresses of its host once, and connects to those that it has looked at: a name
    could have others the next time. A host that is ``named`` may have any."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.named = set[tuple[str | None, int]]()

    def connect(self) -> None:
        host, failed = self.host, OSError(f"{self.host} has no address")
        found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
        try:
            for address in dict.fromkeys(str(each[4][0]) for each in found):
                objection = objection_to_host(address)
                if objection and (host, self.port) not in self.named:
                    raise ConfigurationError(f"{host}: {objection}")
                self.host = address
                try:
                    return super().connect()
                except OSError as error:
                    failed = error
        finally:
            self.host = host  # which TLS asks the server to prove
        raise failed


class _Https(HTTPSConnection, _Http):
    pass
