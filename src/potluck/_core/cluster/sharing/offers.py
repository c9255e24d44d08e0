"""``Offers``: whose jobs this machine and the others run, by their owners' rules.

Every agent sends the others its ``Offer``, so that the leader places no worker where it would be
refused. That is a courtesy: each machine holds to its own rules whatever the leader orders
(``cluster/jobs/local_runner.py``). The rule and decisions of this machine's owner are in
``<home>/sharing.json`` (mode 0600, ``SharingStore``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import read_private, replace_private
from potluck._core.cluster.links.local import Client, Commands
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.sharing import rules
from potluck._core.cluster.sharing.rules import Kept
from potluck._core.cluster.trust.credentials import is_by_starter
from potluck._core.wire import local
from potluck._core.wire.jobs import JobSpec
from potluck._core.wire.peers import Introduction, Offer
from potluck.errors import ConfigurationError, PotluckError

FILE = "sharing.json"
_WHAT = "the list of members whose jobs run here"


class SharingStore:
    """The file in ``home``. An agent does not start while the file is damaged: no decision is lost
    unnoticed."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE

    def read(self) -> Kept:
        """What is kept; the default if there is no file. ConfigurationError if it is damaged."""
        try:
            return msgspec.json.decode(read_private(self._path, _WHAT), type=Kept)
        except FileNotFoundError:
            return Kept()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{_WHAT} {self._path} is damaged: {error}; remove it and decide anew, with "
                "potluck up --run-for"
            ) from error

    def write(self, kept: Kept) -> None:
        """Keep this from now on."""
        data = msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n"
        replace_private(self._path, _WHAT, data)


_MAX_KEPT = 1024


@dataclass(eq=False, repr=False)
class Offers:
    """``listeners`` are called after each change of an offer, this machine's or another's.

    Without a ``store``, as for a private agent, only this machine's own jobs run, and
    nothing can change that. ``objects_to(node)`` is why ``node`` is not in the cluster, by
    this machine's own list; None if it is.
    """

    me: str
    names: NodeNames
    links: PeerLinks
    commands: Commands
    _: KW_ONLY
    store: SharingStore | None
    objects_to: Callable[[str], str | None]
    on_note: Callable[[str], None]

    def __post_init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._kept = rules.Kept("none") if self.store is None else self.store.read()
        self._theirs: dict[str, Offer] = {}
        self._changing = asyncio.Lock()
        self.links.on(Offer, self._received)
        self.links.on_linked.append(self._linked)
        self.commands.on(local.ShareRequest, self._asked)

    # What is asked.

    @property
    def mine(self) -> Offer:
        """This machine's offer."""
        return self._kept.offer()

    def of(self, node: str) -> Offer | None:
        """The offer of ``node``; None before it has sent one."""
        return self.mine if node == self.me else self._theirs.get(node)

    def refusal(self, node: str, starter: str) -> str:
        """Why ``node`` runs no job of ``starter``, by the offer of ``node``; empty if it does, or
        sent none yet."""
        offer = self.of(node)
        if offer is None:
            return ""
        called = self.names.called
        return rules.objection(offer, is_own=node == starter, starter=starter, called=called)

    def objection(self, node: str, starter: str) -> str:
        """As ``refusal``; ``node`` is also not to be used before it has sent an offer."""
        if self.of(node) is None:
            return "it has not told yet whose jobs it runs"
        return self.refusal(node, starter)

    def refuses(self, spec: JobSpec) -> str:
        """Why this machine does not run the job of ``spec``, and what to do; empty if it does."""
        if not is_by_starter(spec):
            starter = self.names.called(spec.starter)
            return f"it is said to be started by {starter}, but has no signature of that node"
        if spec.starter != self.me and (out := self.objects_to(spec.starter)):
            return out
        return self.refusal(self.me, spec.starter)

    def undecided(self) -> tuple[str, ...]:
        """The linked nodes about which the owner is to be asked."""
        return rules.undecided(self.mine, self.links.nodes)

    # What the owner decides.

    async def decide(self, node: str, *, is_allowed: bool) -> None:
        """The owner allows or denies jobs of ``node``."""
        await self._change(lambda kept: rules.decided(kept, node, is_allowed=is_allowed))
        word = "run here from now on" if is_allowed else "don't run here any more"
        self.on_note(f"jobs of {self.names.called(node)} {word}")

    async def pause(self, is_paused: bool) -> None:
        """The owner takes the machine back, or gives it again."""
        await self._change(lambda kept: msgspec.structs.replace(kept, is_paused=is_paused))
        self.on_note(
            "paused: this machine runs no workers until `potluck resume`"
            if is_paused
            else "resumed: this machine takes part in jobs again"
        )

    async def barred(self, nodes: Collection[str]) -> None:
        """``nodes`` are out of the cluster: what the owner allowed them is over, also if they come
        back. Under the rule `all` they are denied then, under `ask` the owner is asked."""
        if self.store is None or rules.forgotten(self._kept, nodes) == self._kept:
            return
        try:
            await self._change(lambda kept: rules.forgotten(kept, nodes))
        except PotluckError as error:
            self.on_note(f"what this machine's owner allowed banned nodes is still kept: {error}")

    async def _change(self, changed: Callable[[rules.Kept], rules.Kept]) -> None:
        """A change holds once it is on disk; several are made one after the other."""
        assert self.store is not None, "a private agent has no owner's rules"
        async with self._changing:
            kept = changed(self._kept)
            await asyncio.to_thread(self.store.write, kept)
            self._kept = kept
        for node in self.links.nodes:
            self.links.send(node, self.mine)
        self._tell()

    async def _asked(self, request: local.ShareRequest, client: Client) -> local.CommandResult:
        match request.change:
            case "pause" | "resume":
                await self.pause(request.change == "pause")
                text = "paused" if request.change == "pause" else "resumed"
            case _:
                is_allowed = request.change == "allow"
                await self.decide(request.node, is_allowed=is_allowed)
                word = "allowed" if is_allowed else "denied"
                text = f"jobs of {self.names.called(request.node)} are {word} here"
        return local.CommandResult(True, text)

    # Other nodes.

    def _linked(self, node: str, introduction: Introduction) -> None:
        self.links.send(node, self.mine)
        self._tell()

    def _received(self, node: str, offer: Offer) -> None:
        if len(self._theirs) >= _MAX_KEPT:
            here = set(self.links.nodes)
            self._theirs = {each: it for each, it in self._theirs.items() if each in here}
        self._theirs[node] = offer
        self._tell()

    def _tell(self) -> None:
        for listen in self.listeners:
            listen()
