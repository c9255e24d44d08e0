"""The cluster as one node sees it, for the commands of its machine."""

from __future__ import annotations

from collections.abc import Callable

from potluck.cluster.links.peers import ControlLinks
from potluck.cluster.membership.failure_detector import FailureDetector
from potluck.cluster.names import NodeNames
from potluck.cluster.topology.surveyor import Surveyor
from potluck.wire.facts import NodeFacts
from potluck.wire.local import NodeInfo
from potluck.wire.nodes import View
from potluck.wire.peers import Introduction


class Report:
    """What is known of the nodes. ``introduction(node)`` is what ``node`` said of itself, None
    without a link to it."""

    def __init__(
        self,
        me: str,
        names: NodeNames,
        links: ControlLinks,
        detector: FailureDetector,
        surveyor: Surveyor,
        introduction: Callable[[str], Introduction | None],
    ) -> None:
        self._me = me
        self._names = names
        self._links = links
        self._detector = detector
        self._surveyor = surveyor
        self._introduction = introduction

    def nodes(self, view: View | None) -> tuple[NodeInfo, ...]:
        """This node, those of ``view``, and those there is a link to; the members first."""
        seats = () if view is None else view.nodes
        known = {self._me, *seats, *self._links.nodes}
        order = sorted(known, key=lambda node: (node not in seats, node))
        return tuple(self._node(node, view) for node in order)

    def _node(self, node: str, view: View | None) -> NodeInfo:
        is_me = node == self._me
        peer = self._detector.peers.get(node)
        said = self._introduction(node)
        facts = self._surveyor.facts(node) or NodeFacts(node)
        return NodeInfo(
            node=node,
            name=said.name if said else self._names.name(node),
            role=_role(node, view),
            link="self" if is_me else peer.status.value if peer else "none",
            host="" if is_me else self._links.address(node),
            latency_ms=1000 * peer.latency_s if peer else 0.0,
            python=said.versions.python if said else "",
            torch=said.versions.torch if said else "",
            potluck=said.versions.potluck if said else "",
            cores=facts.cores,
            memory_bytes=facts.memory_bytes,
            accelerators=facts.accelerators,
            samples_per_s=facts.samples_per_s,
        )


def _role(node: str, view: View | None) -> str:
    if view is None or node not in view.nodes:
        return ""
    return "leader" if node == view.leader else "member"
