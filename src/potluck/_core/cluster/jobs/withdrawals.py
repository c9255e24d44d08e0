"""``Withdrawals``: the nodes whose owners took them out of a job that runs there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from potluck._core.wire.jobs import Reported


class Withdrawals:
    """Calls ``leave(node, refusal)`` when the owner of a node with workers took the node out, and
    ``ask(node)`` for a report when the owner gave it again. ``refusal(node)`` is the owner's word,
    empty if the job may run."""

    def __init__(
        self,
        refusal: Callable[[str], str],
        *,
        leave: Callable[[str, str], None],
        ask: Callable[[str], None],
    ) -> None:
        self._refusal = refusal
        self._leave = leave
        self._ask = ask
        self._nodes: set[str] = set()

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def look(self, nodes: Iterable[str]) -> None:
        """The word of some of ``nodes`` may have changed."""
        for node in nodes:
            refusal = self._refusal(node)
            if refusal and node not in self._nodes:
                self._nodes.add(node)
                self._leave(node, refusal)
            elif not refusal and node in self._nodes:
                self._ask(node)

    def is_out(self, node: str, told: Reported) -> bool:
        """Whether ``node``, which reported, is still out: also until the workers that it had have
        ended, so that nothing is taken for the word of new ones."""
        is_willing = not (told.error or any(each.is_alive for each in told.workers))
        if is_willing and not self._refusal(node):
            self._nodes.discard(node)
        return node in self._nodes
