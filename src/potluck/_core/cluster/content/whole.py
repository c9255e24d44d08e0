"""A fetch of one file of which only the SHA-256 of the whole is known, as of a wheel in a lock:
from members, and from outside of the cluster, from where each byte is read once.

Members that answer for chunks declare the chunks' hashes: those that have verified the whole, and
those that fetched them from outside. Others only pass chunks on. Whoever sends something else than
it had declared when it was asked is named; what a member passes on that is not what another one
declared is not taken, and nobody is blamed: either may be wrong. Once all chunks are here the hash
of the whole decides. If it does not fit, what others answer for is read anew from outside; without
that, the members whose lists disagree are left aside one by one, and one that declared all chunks
of what does not fit is named. When the whole fits, all who declared what is not so are named.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import KW_ONLY, dataclass

import numpy as np

from potluck._core.background import in_thread
from potluck._core.cluster.content.download import Download, called
from potluck._core.cluster.content.package import UNKNOWN, Content, whole_file
from potluck._core.cluster.content.swarm import OUTSIDE, Run
from potluck._core.wire import bulk
from potluck.errors import LinkError, PotluckError, ProtocolError

Outside = Callable[[int, int], AsyncIterator[bytes]]
"""``outside(begin, count)``: these bytes of the file, as they come. LinkError if they do not."""

_TELL_S = 2.0
_MAX_DOUBTS = 4


@dataclass(eq=False, repr=False)
class WholeDownload(Download):
    """The fetch of a ``package`` of ``whole_file``."""

    _: KW_ONLY
    outside: Outside | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        [self._content] = self.package.contents
        self._hashes = list(self.package.hashes)
        self._authors = dict[int, str]()
        """Who answers for a chunk; nobody, for those that were on the disk."""
        self._lists = dict[str, dict[int, bytes]]()
        """What members declared."""
        self._sworn = dict[Run, dict[int, bytes]]()
        """What a member had declared when it was asked. What it declares later is not held against
        the bytes that it sends now: it may have passed on what a third one answers for."""
        self._doubts = Counter[str]()
        self._aside = set[str]()
        """Members that are not asked, although nothing wrong is known of them."""

    async def look(self) -> int:
        missing = await super().look()
        self.swarm.known[:] = [each != UNKNOWN for each in self._hashes]
        return missing

    def _begin(self) -> None:
        if self.outside is not None:
            self._tasks.start(self._reach())

    async def _reach(self) -> None:
        """Begin outside once all members have said what they have and await, or can't be asked. Of
        two nodes that begin at one time at least one is thus heard by the other before either
        chooses, and the one that was not heard of hears what the other one took."""
        while self._asking & {*self.members.nodes}:
            await self._wait()
        all_ = np.ones(len(self._hashes), bool)
        now = asyncio.get_running_loop().time()
        self.swarm.joined(OUTSIDE, all_, ~all_, is_fetching=False, now=now)
        self._open(OUTSIDE)

    # What members declare.

    @property
    def holding(self) -> bulk.Holding:
        """What this node has, awaits, and answers for."""
        plain, has = super().holding, np.flatnonzero(self.swarm.has)
        declares = self._declared([Run(int(chunk), int(chunk), "", 0.0) for chunk in has])
        return bulk.Holding(plain.has, plain.awaits, True, declares, self.outside is not None)

    def _declared(self, runs: Iterable[Run]) -> bulk.Declared:
        mine = (
            chunk for run in runs for chunk in run.chunks if self._authors.get(chunk) == self.me
        )
        return tuple((chunk, self._hashes[chunk]) for chunk in mine)

    def _learn(self, node: str, declares: bulk.Declared) -> None:
        for chunk, digest in declares:
            if chunk >= len(self._hashes):
                raise ProtocolError(f"node {node[:12]} declared a chunk that is none")
            self._lists.setdefault(node, {})[chunk] = digest
        self._adopt()

    def _adopt(self) -> None:
        """Take the hashes of chunks of which none is known from what members declared."""
        for node in self._lists.keys() - self._liars:
            for chunk, digest in self._lists[node].items():
                if self._hashes[chunk] == UNKNOWN:
                    self._hashes[chunk], self._authors[chunk] = digest, node
                    self.swarm.known[chunk] = True

    # Chunks.

    async def _bring(self, node: str, run: Run) -> None:
        declared = self._lists.get(node, {})
        self._sworn[run] = {chunk: declared[chunk] for chunk in run.chunks if chunk in declared}
        try:
            await super()._bring(node, run)
        finally:
            del self._sworn[run]

    def _check(self, run: Run, chunk: int, digest: bytes) -> None:
        node, own = run.member, self._sworn[run].get(chunk)
        if self._content.num_chunks == 1:
            own = self._content.root  # whatever it declared
        if own is not None:
            if digest != own:
                raise ProtocolError(f"{called(node)} sent other bytes than those of chunk {chunk}")
        elif node != OUTSIDE and digest != self._hashes[chunk]:
            self._doubts[node] += self._hashes[chunk] != UNKNOWN
            if self._doubts[node] > _MAX_DOUBTS:
                self._put_aside(node)
            raise LinkError(f"its chunk {chunk} is not the one that another node declared")

    def _accept(self, run: Run, chunk: int, digest: bytes) -> None:
        if self._content.num_chunks == 1:
            return
        if run.member == OUTSIDE:
            self._hashes[chunk], self._authors[chunk] = digest, self.me
        elif chunk in self._sworn[run]:
            self._hashes[chunk], self._authors[chunk] = digest, run.member

    async def _receive(self, node: str, run: Run) -> bytearray | None:
        if node != OUTSIDE:
            return await super()._receive(node, run)
        begin, end = (int(self.package.offsets[each]) for each in (run.first, run.last + 1))
        told = asyncio.get_running_loop().time()
        data = bytearray()
        async for piece in self._read(begin, end - begin):
            data += piece
            self._moved = now = asyncio.get_running_loop().time()
            if now - told > _TELL_S:  # it goes on here: nobody need take over
                told = now
                self._announce(awaits=[run])
        return data

    async def _read(self, begin: int, count: int) -> AsyncIterator[bytes]:
        assert self.outside is not None
        async for piece in self.outside(begin, count):
            count -= len(piece)
            if count < 0:
                break
            yield piece
        if count:
            raise ProtocolError(f"{called(OUTSIDE)} sent another number of bytes")

    async def _finish(self, content: Content) -> bool:
        """See the module. Only who is named must have lied."""
        while not await self._is_right():
            authors = {self._authors.get(chunk, "") for chunk in range(len(self._hashes))}
            others = authors - {self.me}
            if "" in authors:
                self._drop("")
            elif not others:
                self._failure = LinkError(f"{called(OUTSIDE)} has a file with another SHA-256")
            elif OUTSIDE in self.swarm.members:
                await self._read_anew()
                continue
            elif len(authors) == 1:
                [liar] = authors
                self._liars -= self._aside
                self._aside.clear()
                self._lied(liar, f"node {liar[:12]} declared chunks that make another file")
                self._drop(liar)
            else:  # one of them, or the source outside, but nobody knows who
                odd = max(others, key=self._num_disputed)
                self._put_aside(odd)
                self._leaves(odd, "its list of chunks is disputed")
                self._drop(odd)
            return False
        return await super()._finish(content)

    def _put_aside(self, node: str) -> None:
        self._aside.add(node)
        self._liars.add(node)

    def _num_disputed(self, node: str) -> int:
        """How many hashes that ``node`` declared others declared differently."""
        lists = [each for other, each in self._lists.items() if other not in self._liars | {node}]
        mine = self._lists.get(node, {})
        return sum(each.get(chunk, mine[chunk]) != mine[chunk] for each in lists for chunk in mine)

    def _drop(self, author: str) -> None:
        """Fetch again what ``author`` answers for."""
        wrong = [c for c in range(len(self._hashes)) if self._authors.get(c, "") == author]
        for chunk in wrong:
            self._hashes[chunk] = UNKNOWN
            self._authors.pop(chunk, None)
        self._taken[wrong] = self.swarm.known[wrong] = False
        self.swarm.lacks(wrong)
        self._missing[self._content] = len(wrong)
        self._adopt()
        for node in self.swarm.members:
            if node != OUTSIDE:  # it may have verified the whole by now, and declare all
                self._leaves(node, "it is asked again what it has")
                self._asked.pop(node, None)

    async def _is_right(self) -> bool:
        if await in_thread(self.shelf.hash, self._content) != self._content.root:
            return False
        self._authors = dict.fromkeys(range(len(self._hashes)), self.me)
        for node, declared in self._lists.items():
            wrong = [chunk for chunk, each in declared.items() if each != self._hashes[chunk]]
            if node in self._aside:
                self._liars.discard(node)
            if wrong:
                self._lied(node, f"node {node[:12]} declared a wrong hash of chunk {wrong[0]}")
        await in_thread(self._remember)
        return True

    def _remember(self) -> None:
        """Keep the hashes, so that chunks on the disk can be verified in the next life."""
        self.shelf.keep(whole_file(*self._content, self._hashes), anew=True)

    async def _read_anew(self) -> None:
        """Read from outside what others answer for; without the rest, if that fails."""
        try:
            for chunk, author in list(self._authors.items()):
                if author == self.me:
                    continue
                begin, size = int(self.package.offsets[chunk]), int(self.package.sizes[chunk])
                data = b"".join([piece async for piece in self._read(begin, size)])
                digest = hashlib.sha256(data).digest()
                if digest != self._hashes[chunk]:
                    await in_thread(self.shelf.write, self._content, begin, data)
                self._hashes[chunk], self._authors[chunk] = digest, self.me
        except PotluckError as error:
            self._leaves(OUTSIDE, str(error))
