"""A fetch of one package from all members that have something of it.

Chunks are asked for as ``Swarm`` decides, verified when they arrive, written, announced, and served
to others from then on. A member that sends a wrong chunk is named and not asked again. A fetch ends
with an error only if nobody has what is missing, and nothing has arrived for a while; what is on
the disk then is the beginning of the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np

from potluck._core.background import Tasks, in_thread, stop
from potluck._core.cluster.content.package import (
    MAX_DESCRIPTION,
    Content,
    Package,
)
from potluck._core.cluster.content.shelf import Shelf
from potluck._core.cluster.content.swarm import LANES, Mask, Run, Swarm
from potluck._core.wire import bulk
from potluck._core.wire.bulk import Namespace
from potluck.errors import LinkError, PotluckError, ProtocolError

PATIENCE_S = 10.0
"""How long nothing may arrive while nobody has what is missing."""
_MAX_SILENCE_S = 120.0
_LOOK_S = 0.5
_ASK_AGAIN_S = 2.0
_MAX_RUNS = 16
"""Requests that are open at one time, to all members: each fills memory of about one chunk."""

T = TypeVar("T")
Progress = Callable[[int, str], None]
"""``progress(num_bytes, node)``: so many more, verified, have come from ``node``."""


class Members(Protocol):
    """The other nodes, as a fetch reaches them; see ``links.bulk.BulkLinks``."""

    @property
    def nodes(self) -> Collection[str]:
        """The nodes that can be asked."""
        ...

    async def ask(self, node: str, request: bulk.Request, kind: type[T]) -> T:
        """The response of ``node``. LinkError if there is none; ProtocolError if it is of another
        type."""
        ...

    def part_bytes(self, node: str) -> int:
        """How many bytes to ask of ``node`` by one request."""
        ...

    def tell(self, node: str, message: bulk.Announce) -> None:
        """Send ``message``, without blocking."""


async def fetch_description(
    members: Members, node: str, namespace: Namespace, name: bytes
) -> bytes:
    """The description of the package ``name``, not verified; errors as for ``Members.ask``."""
    data = bytearray()
    while True:
        request = bulk.DescriptionRequest(namespace, name, len(data))
        part = await members.ask(node, request, bulk.Part)
        is_whole = len(part.data) == min(bulk.MAX_PART, part.size - len(data)) > 0
        if part.size > MAX_DESCRIPTION or not is_whole:
            raise ProtocolError(f"node {node[:12]} sent another part than was asked for")
        data += part.data
        if len(data) == part.size:
            return bytes(data)


@dataclass(eq=False, repr=False)
class Download:
    """The fetch of ``package`` by node ``me`` into ``shelf``. ``wanted``: the contents to fetch
    (None: all); ``only``: the nodes to ask (None: all).

    ``on_progress(num_bytes, node)``: so many more verified bytes have come from ``node``;
    ``on_whole(content)``: all of it is on the shelf; ``on_liar(node, text)``: ``node`` sent what is
    wrong. ``patience_s``: how long it is waited for a member that has what is missing.
    """

    members: Members
    shelf: Shelf
    namespace: Namespace
    package: Package
    _: KW_ONLY
    me: str
    wanted: Collection[Content] | None = None
    only: Collection[str] | None = None
    on_progress: Progress = lambda num_bytes, node: None
    on_whole: Callable[[Content], None] = lambda content: None
    on_liar: Callable[[str, str], None] = lambda node, text: None
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self.swarm: Swarm
        self._liars: set[str] = set()
        self._asked: dict[str, float] = {}
        self._asking = set[str]()
        self._missing: dict[Content, int] = {}
        """Of contents that are not whole, the chunks that were not written."""
        self._taken: Mask
        """Chunks that are here, or on their way to the disk: of each chunk one copy is written."""
        self._num_finishing = 0
        self._news = asyncio.Event()
        self._moved = 0.0
        self._why: dict[str, str] = {}
        self._failure: Exception | None = None
        self._tasks = Tasks()
        self._lanes: Counter[str] = Counter()
        self._room = asyncio.Semaphore(_MAX_RUNS)

    async def look(self) -> int:
        """Look what is on the disk; how many bytes are missing. Reads what there is of files that
        are not whole."""
        package = self.package
        has = self._taken = await asyncio.to_thread(self.shelf.present, package)
        wanted = np.full(len(has), self.wanted is None)
        for content in self.wanted or ():
            chunks = package.chunks_of(content)
            wanted[chunks.start : chunks.stop] = True
        self.swarm = Swarm(package.sizes, has, me=self.me, wanted=wanted)
        for content in package.contents:
            chunks = package.chunks_of(content)
            missing = int((~has[chunks.start : chunks.stop]).sum())
            if missing:
                self._missing[content] = missing
            elif not self.shelf.has(content):  # killed before the last step
                await self._finish(content)
        return int(package.sizes[wanted & ~self.swarm.has].sum())

    def prefer(self, contents: Iterable[Content], *, turn: int = 0) -> None:
        """Fetch these first, also if they were not wanted before; of those the ones with a lower
        ``turn`` (below 2**22)."""
        for content in contents:
            self.swarm.prefer(self.package.chunks_of(content), turn)
        self._wake()

    async def run(self) -> None:
        """Fetch what is wanted. LinkError, with what was heard, if nobody has what is missing;
        OSError if it can't be written."""
        self._moved = _now()
        self._begin()
        try:
            while self._failure is None and not self._is_over:
                self._look_for_members()
                await self._wait()
                silence_s = _now() - self._moved
                is_idle = not (self._asking or self._num_finishing or self.swarm.num_open)
                patience_s = self.patience_s if is_idle else _MAX_SILENCE_S
                if silence_s > patience_s and not self._is_over:
                    raise LinkError(self._stalled())
            if self._failure is not None:
                raise self._failure
        finally:
            await self._tasks.close()

    @property
    def _is_over(self) -> bool:
        return self.swarm.is_done and not self._num_finishing

    def _begin(self) -> None:
        """Whatever else is to happen before the first look for members."""

    def _stalled(self) -> str:
        missing = int((self.swarm.wanted & ~self.swarm.has).sum())
        heard = "; ".join(f"{node[:12]}: {why}" for node, why in sorted(self._why.items())[:8])
        return f"no node sends the {missing} chunks that are missing" + f" ({heard})" * bool(heard)

    # Members.

    def _look_for_members(self) -> None:
        now = _now()
        for node in self.members.nodes if self.only is None else self.only:
            was_asked = now - self._asked.get(node, now - _ASK_AGAIN_S) < _ASK_AGAIN_S
            is_known = node in self.swarm.members or node in self._liars or node in self._asking
            if is_known or was_asked or node == self.me:
                continue
            self._asked[node] = now
            self._asking.add(node)
            self._tasks.start(self._ask_for_holding(node))

    async def _ask_for_holding(self, node: str) -> None:
        mine = self.holding
        request = bulk.HoldingRequest(
            self.namespace, self.package.name, mine.has, mine.awaits, mine.declares, mine.reaches
        )
        try:
            self.joined(node, await self.members.ask(node, request, bulk.Holding))
        except PotluckError as error:
            self._why[node] = str(error)
        finally:
            self._asking.discard(node)
            self._wake()

    @property
    def holding(self) -> bulk.Holding:
        """What this node has and awaits."""
        return bulk.Holding(packed(self.swarm.has), packed(self.swarm.awaits), True)

    def joined(self, node: str, holding: bulk.Holding) -> None:
        """``node`` said what it has and awaits. ProtocolError if that can't be."""
        count = len(self.package.hashes)
        masks = unpacked(holding.has, count), unpacked(holding.awaits, count)
        if node in self._liars or not (masks[0].any() or holding.is_fetching):
            return
        self._learn(node, holding.declares)
        is_fetching, reaches = holding.is_fetching, holding.reaches
        self.swarm.joined(node, *masks, is_fetching=is_fetching, reaches=reaches, now=_now())
        self._why.pop(node, None)
        self._open(node)

    def _open(self, node: str) -> None:
        for _ in range(LANES - self._lanes[node]):
            self._lanes[node] += 1
            self._tasks.start(self._lane(node))
        self._wake()

    def told(self, node: str, message: bulk.Announce) -> None:
        """``node`` announced what changed there. ProtocolError if that can't be."""
        if node not in self._liars:
            self._learn(node, message.declares)
            self.swarm.heard(node, message.got, message.awaits, message.given_up, now=_now())
            self._wake()

    def _learn(self, node: str, declares: bulk.Declared) -> None:
        """``node`` declared hashes of chunks: of no use where the package has all of them."""

    def _declared(self, runs: Iterable[Run]) -> bulk.Declared:
        """What this node declares of the chunks of ``runs``."""
        return ()

    def _leaves(self, node: str, why: str) -> None:
        self._why[node] = why
        self._announce(given_up=self.swarm.left(node))

    def _lied(self, node: str, text: str) -> None:
        if node not in self._liars:
            self._liars.add(node)
            self.on_liar(node, text)
        self._leaves(node, text)

    # Chunks.

    async def _lane(self, node: str) -> None:
        """One of the requests that are open at ``node``, one after the other, until it leaves."""
        try:
            while node in self.swarm.members:
                async with self._room:
                    run = self.swarm.next(node, _now())
                    if run is not None:
                        await self._bring(node, run)
                if run is None:
                    await self._wait()
        except ProtocolError as error:
            self._lied(node, str(error))
        except PotluckError as error:
            self._leaves(node, str(error))
        except OSError as error:
            self._failure = error
        finally:
            self._lanes[node] -= 1
            self._wake()

    async def _bring(self, node: str, run: Run) -> None:
        self._announce(awaits=[run])
        data = await self._receive(node, run)
        if data is None:
            self.swarm.failed(run, _now())
        else:
            await self._take(node, run, data)

    async def _receive(self, node: str, run: Run) -> bytearray | None:
        """The bytes of ``run``; None if they came, or are to come, from elsewhere."""
        begin, end = int(self.package.offsets[run.first]), int(self.package.offsets[run.last + 1])
        data, step = bytearray(end - begin), self.members.part_bytes(node)

        async def receive(at: int) -> None:
            count = min(step, end - at)
            request = bulk.PartRequest(self.namespace, self.package.name, at, count)
            part = await self.members.ask(node, request, bulk.Part)
            if len(part.data) != count:
                raise ProtocolError(f"node {node[:12]} sent another part than was asked for")
            run.num_bytes += count
            data[at - begin : at - begin + count] = part.data
            self._moved = _now()

        parts = [asyncio.ensure_future(receive(at)) for at in range(begin, end, step)]
        waiting = set(parts)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for each in done:
                    each.result()
                if self.swarm.is_void(run, _now(), is_full=self._room.locked()):
                    return None
            return data
        finally:
            await stop(*parts)

    async def _take(self, node: str, run: Run, data: bytearray) -> None:
        """Verify the chunks of ``run``, and write those that did not come before."""
        package, begin = self.package, int(self.package.offsets[run.first])

        def some(chunk: int) -> memoryview:
            at = int(package.offsets[chunk]) - begin
            return memoryview(data)[at : at + int(package.sizes[chunk])]

        def hash_all() -> list[bytes]:
            return [hashlib.sha256(some(chunk)).digest() for chunk in run.chunks]

        def write() -> None:
            self._remember()
            for chunk in fresh:
                content, offset = package.place_of(chunk)
                self.shelf.write(content, offset, some(chunk))

        self._num_finishing += 1
        try:
            digests = await in_thread(hash_all)
            for chunk, digest in zip(run.chunks, digests, strict=True):
                self._check(run, chunk, digest)
            # Nothing waits between here and the mark: a second copy of a chunk is never written.
            fresh = [chunk for chunk in run.chunks if not self._taken[chunk]]
            self._taken[fresh] = True
            for chunk in fresh:
                self._accept(run, chunk, digests[chunk - run.first])
            await in_thread(write)
            self.swarm.arrived(run, _now(), fresh)
            alone = [Run(chunk, chunk, node, 0.0) for chunk in fresh]
            self._announce(got=[run] if len(fresh) == len(run.chunks) else alone)
            self.on_progress(int(package.sizes[fresh].sum()), node)
            for content, chunks in groupby(fresh, lambda chunk: package.place_of(chunk)[0]):
                self._missing[content] -= len(list(chunks))
                if not self._missing[content]:
                    del self._missing[content]
                    if content.num_chunks == 1 or await self._finish(content):
                        self.on_whole(content)
        finally:
            self._num_finishing -= 1
            self._wake()

    def _check(self, run: Run, chunk: int, digest: bytes) -> None:
        """ProtocolError if the member of ``run`` lied: it sent ``chunk`` with this SHA-256.
        LinkError if the chunk can't be verified."""
        if digest != self.package.hashes[chunk]:
            member = called(run.member)
            raise ProtocolError(f"{member} sent other bytes than those of chunk {chunk}")

    def _accept(self, run: Run, chunk: int, digest: bytes) -> None:
        """``chunk``, checked, is taken from ``run``."""

    def _remember(self) -> None:
        """What a next life must know before a chunk is written. In a thread."""

    async def _finish(self, content: Content) -> bool:
        """All chunks of ``content`` are written: whether they are right, and it is whole now."""
        await in_thread(self.shelf.finish, content)
        return True

    def _announce(
        self, *, got: Sequence[Run] = (), awaits: Sequence[Run] = (), given_up: Sequence[Run] = ()
    ) -> None:
        message = bulk.Announce(
            self.namespace,
            self.package.name,
            got=_ranges(got),
            awaits=_ranges(awaits),
            given_up=_ranges(given_up),
            declares=self._declared(got),
        )
        if message.got or message.awaits or message.given_up:
            for node in self.swarm.fetching:
                self.members.tell(node, message)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _wait(self) -> None:
        """Until there may be something to ask for, or a look is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._news.wait()


def _ranges(runs: Sequence[Run]) -> bulk.Ranges:
    return tuple((run.first, run.last) for run in runs)


def called(node: str) -> str:
    """A member in a text for people."""
    return f"node {node[:12]}" if node else "the source outside of the cluster"


def packed(mask: Mask) -> bytes:
    """A bitmap; empty if nothing is set."""
    return np.packbits(mask, bitorder="little").tobytes() if mask.any() else b""


def unpacked(bitmap: bytes, count: int) -> Mask:
    """The mask of ``count`` chunks in ``bitmap``; ProtocolError if it is of another length."""
    if not bitmap:
        return np.zeros(count, bool)
    if len(bitmap) != -(-count // 8):
        raise ProtocolError("a bitmap is not as long as its package")
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little")
    return bits.astype(bool)


def _now() -> float:
    return asyncio.get_running_loop().time()
