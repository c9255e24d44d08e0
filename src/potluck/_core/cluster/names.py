"""Names of nodes for people: the name that a node gives itself, and the start of its id. Pure."""

from __future__ import annotations

import re

_ID = re.compile(r"\b[0-9a-f]{64}\b")


class NodeNames:
    """The names as one node knows them; ``me`` is its id and ``mine`` its own name."""

    def __init__(self, me: str, mine: str) -> None:
        self._names = {me: mine}

    def met(self, node: str, name: str) -> None:
        """``node`` gave this name for itself."""
        self._names[node] = name

    def name(self, node: str) -> str:
        """The name that ``node`` gave for itself; empty if it was never met."""
        return self._names.get(node, "")

    def called(self, node: str) -> str:
        """``ada (1f2e3d4c)``; ``node 1f2e3d4c`` if it was never met."""
        name = self.name(node)
        return f"{name} ({node[:8]})" if name else f"node {node[:8]}"

    def label(self, node: str) -> str:
        """A short name, different from those of other nodes: ``ada``, ``ada-1f2e``."""
        name = self.name(node)
        is_taken = any(other == name for each, other in self._names.items() if each != node)
        return f"{name or 'node'}-{node[:4]}" if is_taken or not name else name

    def readable(self, text: str) -> str:
        """``text`` with names in the place of ids."""
        return _ID.sub(lambda found: self.called(found[0]), text)
