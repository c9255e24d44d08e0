"""The I/O of a change of the cluster's secret: what ``Rotation`` decides is sent and stored."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from potluck.background import Alarm, OnBroken
from potluck.cluster.links.local import Client, Commands
from potluck.cluster.links.peers import PeerLinks
from potluck.cluster.trust import keyring
from potluck.cluster.trust.rotation import Action, Drop, Rotation, Say, Store, Tell, Use
from potluck.wire import local, peers

_MESSAGES = peers.NewSecret | peers.SecretStored | peers.UseSecret | peers.DropSecret


class SecretChange:
    """One node's part in changes of the secret below ``home``. ``fixed`` as in ``Rotation``."""

    def __init__(
        self,
        home: Path,
        links: PeerLinks,
        commands: Commands,
        *,
        fixed: str,
        on_note: Callable[[str], None],
        on_broken: OnBroken,
    ) -> None:
        self._home = home
        self._links = links
        self._rotation = Rotation(fixed)
        self._on_note = on_note
        self._on_broken = on_broken
        self._outcome: asyncio.Future[local.CommandResult] | None = None
        self._alarm = Alarm(self._tick)
        links.on(_MESSAGES, self._received)
        links.on_linked.append(self._linked)
        links.on_ended.append(self._ended)
        commands.on(local.RotateRequest, self._ordered)

    async def close(self) -> None:
        """No timer stays."""
        self._alarm.set(None)

    async def _ordered(self, request: local.RotateRequest, client: Client) -> None:
        if self._outcome is not None and not self._outcome.done():
            client.take(local.CommandResult(False, "the secret is being changed already"))
            return
        self._outcome = asyncio.get_running_loop().create_future()
        psk, name = secrets.token_bytes(32), secrets.token_hex(8)
        self._do(self._rotation.order(name, psk, self._links.nodes, _now()))
        client.take(await self._outcome)

    def _received(self, node: str, message: peers.PeerMessage) -> None:
        self._do(self._rotation.received(node, message, _now()))

    def _linked(self, node: str, introduction: peers.Introduction, namespace: str) -> None:
        self._do(self._rotation.linked(node, namespace))

    def _ended(self, node: str, incarnation: int, reason: str) -> None:
        self._do(self._rotation.lost(node))

    def _tick(self) -> None:
        self._do(self._rotation.tick(_now()))

    def _do(self, actions: Sequence[Action]) -> None:
        try:
            for action in actions:
                self._act(action)
        except Exception as error:
            self._on_broken(error)
        self._alarm.set(self._rotation.next_wakeup())

    def _act(self, action: Action) -> None:
        match action:
            case Tell(node, message):
                self._links.send(node, message)
            case Store(psk):
                keyring.store_next(self._home, psk)
            case Use():
                keyring.use_next(self._home)
            case Drop():
                keyring.drop_next(self._home)
            case Say(text, ok):
                self._on_note(text)
                if ok is not None and self._outcome is not None and not self._outcome.done():
                    self._outcome.set_result(local.CommandResult(ok, text))


def _now() -> float:
    return asyncio.get_running_loop().time()
