"""Questions of this machine's commands about results, passed on to the nodes that have them."""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.links.local import Client, Commands
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.wire import local, peers
from potluck._core.wire.peers import ResultsTold, ResultsWanted

_Key = int | tuple[bytes, bytes]
_NO_LINK = "there is no link to it"


class ResultRelay:
    """Passes on to nodes what commands ask (``AskNode``), and to the commands what these nodes
    answer; gives ``code_store`` what is not for a command."""

    def __init__(self, links: PeerLinks, commands: Commands, code_store: CodeStore) -> None:
        self._links = links
        self._code_store = code_store
        self._number = 0
        self._waiting: defaultdict[tuple[str, _Key], list[tuple[Client, local.AskNode]]] = (
            defaultdict(list)
        )
        links.on(peers.PackageMessage, self.received)
        links.on_ended.append(lambda node, incarnation, reason: self.lost(node))
        commands.on(local.AskNode, self._asked)
        commands.on_gone.append(self._forget)

    def received(self, node: str, message: peers.PackageMessage) -> None:
        """``node`` asks for something, or answers."""
        if isinstance(message, ResultsTold):
            key: _Key = message.number
        elif isinstance(message, peers.PackagePart | peers.NotHere):
            key = (message.package, message.file)
        else:
            self._code_store.received(node, message)
            return
        waiting = self._waiting.pop((node, key), None)
        for client, asked in waiting or ():
            if isinstance(message, ResultsTold) and isinstance(asked.message, ResultsWanted):
                message = replace(message, number=asked.message.number)
            client.take(local.NodeTold(node, message))
        if waiting is None:
            self._code_store.received(node, message)

    def lost(self, node: str) -> None:
        """The link to ``node`` ended."""
        self._code_store.lost(node)
        for each in [each for each in self._waiting if each[0] == node]:
            for client, asked in self._waiting.pop(each):
                _refuse(client, asked, "the link to it ended")

    async def _asked(self, request: local.AskNode, client: Client) -> None:
        node, message = request.node, request.message
        key: _Key
        if isinstance(message, ResultsWanted):  # commands count for themselves
            self._number += 1
            key = self._number
            message = replace(message, number=key)
        else:
            key = (message.package, message.file)
        if self._links.send(node, message):
            self._waiting[node, key].append((client, request))
        else:
            _refuse(client, request, _NO_LINK)

    def _forget(self, gone: Client) -> None:
        for each, clients in list(self._waiting.items()):
            left = [(client, asked) for client, asked in clients if client is not gone]
            if left:
                self._waiting[each] = left
            else:
                del self._waiting[each]


def _refuse(client: Client, asked: local.AskNode, why: str) -> None:
    wanted = asked.message
    if isinstance(wanted, ResultsWanted):
        client.take(local.NodeTold(asked.node, ResultsTold(wanted.number, error=why)))
    else:
        client.take(local.NodeTold(asked.node, peers.NotHere(wanted.package, wanted.file, why)))
