"""Requests between two parts of a test, which pass over the wire's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from potluck._core.cluster.code_store.package import Ask
from potluck._core.wire import peers
from potluck.errors import LinkError, PotluckError

T = TypeVar("T", bound=peers.ResponseContent)


def asking(answer: Callable[[str, Any], Any], me: str) -> Ask:
    """Asks, in the name of node ``me``, a part that answers by ``answer(node, request)``."""

    async def ask(
        node: str, request: peers.RequestContent, kind: type[T], *, timeout_s: float | None
    ) -> T:
        sent = decoded(peers.Request(1, request))
        try:
            content = answer(me, sent.content)
            content = await content if isinstance(content, Awaitable) else content
        except (PotluckError, OSError) as error:
            raise LinkError(str(error)) from None
        found = decoded(peers.Response(1, content)).content
        assert isinstance(found, kind)
        return found

    return ask


async def nobody(
    node: str, request: peers.RequestContent, kind: type[T], *, timeout_s: float | None
) -> T:
    """Asks without a link."""
    raise LinkError(f"there is no link to node {node[:12]}")


def decoded(message: Any) -> Any:
    """``message`` as it arrives."""
    return peers.MESSAGE.decode(peers.MESSAGE.encode(message)[4:])
