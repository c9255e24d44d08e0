"""Names of nodes for people: the name that a node gives itself, and the start of its id. Pure."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from potluck.errors import ConfigurationError

NODE_ID_DIGITS = 64
MIN_PREFIX = 8

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


def find_node(text: str, nodes: Iterable[tuple[str, str]]) -> str:
    """The full node id that ``text`` means: an id, the beginning of an id, or a name.

    ``nodes`` are the ids and names to choose from. ConfigurationError if ``text`` is unknown, fits
    several nodes, or is too short a beginning. A whole id is never a name: machines choose their
    names, and one may call itself like the id of another.
    """
    wanted, known = text.strip(), dict(nodes)
    digits = wanted.lower()
    is_hex = bool(digits) and set(digits) <= set(string.hexdigits)
    if is_hex and len(digits) == NODE_ID_DIGITS:
        return digits
    named = [node for node, name in known.items() if name and name == wanted]
    begun = [node for node in known if node.startswith(digits)] if len(digits) >= MIN_PREFIX else []
    if named and set(begun) - set(named):
        raise ConfigurationError(
            f"{text!r} is the name of one machine and the beginning of the id of another: write "
            f"the whole id of the one that you mean: {', '.join(sorted({*named, *begun}))}"
        )
    if len(named) == 1:
        return named[0]
    if named:
        raise ConfigurationError(
            f"{len(named)} machines are called {wanted!r}: write the id of one, as `potluck nodes` "
            f"shows it: {', '.join(sorted(node[:12] for node in named))}"
        )
    if not is_hex or not MIN_PREFIX <= len(digits) < NODE_ID_DIGITS:
        raise ConfigurationError(
            f"{text!r} is no machine that is known here: write its name, or at least the first "
            f"{MIN_PREFIX} hexadecimal digits of its id, as `potluck nodes` shows them"
        )
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise ConfigurationError(f"{text!r} fits {len(begun)} nodes: write more of its digits")
    raise ConfigurationError(
        f"no node known here has an id that begins with {digits}; `potluck nodes` shows them"
    )
