"""The cluster as one node sees it, for the commands of its machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from potluck._core.cluster.admission_exchange import AdmissionExchange
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.links.local import Client
from potluck._core.cluster.sharing.rules import who_may
from potluck._core.cluster.topology.graph import stragglers
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.transport.credentials import Credentials
from potluck._core.wire import local
from potluck._core.wire.facts import NodeFacts
from potluck._core.wire.format import Versions
from potluck._core.wire.nodes import View
from potluck._core.wire.versions import JOBS_SINCE
from potluck.errors import PotluckError


@dataclass(eq=False, repr=False)
class Report:
    """What is known of the nodes; ``notes`` are the newest lines for people."""

    agent: AgentParts
    credentials: Credentials
    admissions: AdmissionFile
    exchange: AdmissionExchange
    notes: Callable[[], Collection[str]]

    def __post_init__(self) -> None:
        self.agent.commands.on(local.NodesRequest, self._asked)

    async def _asked(self, request: local.NodesRequest, client: Client) -> local.NodesReply:
        return self.status()

    @property
    def limits(self) -> str:
        """What the owner of this machine gives to jobs, in words; empty for all of it."""
        return self.agent.surveyor.survey.mine.limits

    def status(self) -> local.NodesReply:
        """The cluster as it is seen here now."""
        protocol = self.agent.plane.protocol
        view = protocol.view
        nodes = self._nodes(view)
        links = self.agent.surveyor.links({each.node for each in nodes})
        return local.NodesReply(
            node=self.agent.me,
            pid=os.getpid(),
            port=self.agent.port,
            namespace=self.credentials.namespace,
            epoch=0 if view is None else view.epoch,
            paused=protocol.paused,
            nodes=nodes,
            links=links,
            stragglers=stragglers(links, self.agent.names.label),
            banned=self._banned(),
            is_open=self.is_open,
            events=tuple(self.notes()),
        )

    def _banned(self) -> tuple[str, ...]:
        with contextlib.suppress(PotluckError):  # a list that can't be read: nobody is admitted
            entries = self.admissions.roster.entries
            return tuple(sorted(node for node, each in entries.items() if each.role == "revoked"))
        return ()

    @property
    def is_open(self) -> bool:
        """Whether every holder of the secret is in the cluster."""
        with contextlib.suppress(PotluckError):
            return self.admissions.load() is None
        return False

    def _nodes(self, view: View | None) -> tuple[local.NodeInfo, ...]:
        """This node, the nodes of ``view``, and all linked nodes; the members first."""
        seats = () if view is None else view.nodes
        known = {self.agent.me, *seats, *self.agent.links.nodes}
        order = sorted(known, key=lambda node: (node not in seats, node))
        return tuple(self._node(node, view) for node in order)

    def _node(self, node: str, view: View | None) -> local.NodeInfo:
        is_me = node == self.agent.me
        peer = self.agent.plane.protocol.detector.peers.get(node)
        introduction = self.agent.links.introduction(node)
        facts = self.agent.surveyor.facts(node) or NodeFacts(node)
        offer = self.agent.offers.of(node)
        return local.NodeInfo(
            node=node,
            name=introduction.name if introduction else self.agent.names.name(node),
            role=_role(node, view),
            link="self" if is_me else peer.status.value if peer else "none",
            host="" if is_me else self.agent.links.address(node),
            latency_ms=1000 * peer.latency_s if peer else 0.0,
            python=introduction.versions.python if introduction else "",
            torch=introduction.versions.torch if introduction else "",
            potluck=introduction.versions.potluck if introduction else "",
            upgrade=_upgrade(introduction.versions) if introduction else "",
            cores=facts.cores,
            memory_bytes=facts.memory_bytes,
            accelerators=facts.accelerators,
            samples_per_s=facts.samples_per_s,
            engine=facts.engine,
            site=facts.site,
            limits=facts.limits,
            runs_for=who_may(offer, self.agent.names.label) if offer else "",
            paused=offer is not None and offer.is_paused,
            secret=self.credentials.namespace if is_me else self.exchange.namespaces.get(node, ""),
        )


def _upgrade(versions: Versions) -> str:
    return versions.upgrade if versions.protocol < JOBS_SINCE else ""


def _role(node: str, view: View | None) -> str:
    if view is None or node not in view.nodes:
        return ""
    return "leader" if node == view.leader else "member"
