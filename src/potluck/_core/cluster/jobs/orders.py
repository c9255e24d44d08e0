"""``Orders``: what the leader of a job sends to the nodes of the job's workers."""

from __future__ import annotations

from collections.abc import Sequence

from potluck._core.cluster.jobs.placement import Placement
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.wire import jobs, worker_link


class Orders:
    """The orders about workers of ``job``, each to the node of the worker."""

    def __init__(self, job: str, placement: Placement, links: PeerLinks) -> None:
        self._job = job
        self._placement = placement
        self._links = links

    def start(self, worker: str, attempt: int) -> None:
        """Start the process of ``worker``."""
        for node in self._placement.by_node((worker,)):
            self._links.send(node, jobs.StartWorker(self._job, worker, attempt))

    def tell(self, names: Sequence[str], message: worker_link.FromAgent) -> None:
        """Give ``message`` to the workers ``names``."""
        for node, here in self._placement.by_node(names).items():
            self._links.send(node, jobs.TellWorkers(self._job, here, message))

    def signal(self, workers: Sequence[str], number: int) -> None:
        """Send signal ``number`` to ``workers``."""
        for node, names in self._placement.by_node(workers).items():
            self._links.send(node, jobs.SignalWorkers(self._job, names, number))
