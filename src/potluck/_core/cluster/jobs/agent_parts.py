"""``AgentParts``: the parts of an agent that jobs use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from potluck._core.cluster.control_plane import ControlPlane
from potluck._core.cluster.data_sets.sets import DataSets
from potluck._core.cluster.environments.making import Environments
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.jobs.ledger import Vouching
from potluck._core.cluster.jobs.log import JobLog
from potluck._core.cluster.jobs.process import Launch
from potluck._core.cluster.links.local import Commands
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.sharing.broker import Broker, MayDial
from potluck._core.cluster.sharing.confinement import Confinement
from potluck._core.cluster.sharing.offers import Offers
from potluck._core.cluster.topology.surveyor import Surveyor
from potluck._core.cluster.trust.worker_home import WorkerHomes
from potluck._core.wire.jobs import JobSpec

OuterWorld = Callable[[int], dict[str, str]]


@dataclass(frozen=True, slots=True)
class AgentParts:
    """The parts of the agent of node ``me``. ``port`` is the agent's, ``bind`` the address on which
    its workers listen (empty: all interfaces). ``sign`` adds this node's signature to a job.
    ``worker_homes`` are the folders with the credentials of each job's workers; ``broker`` makes
    the socket broker of workers in a sandbox. ``launcher`` makes the launcher of a job's workers
    (``process.launcher_of``), which ``confinement`` holds to the owner's limits; ``environments``
    are the ones made of what scripts need, ``data`` their data sets. ``note`` shows a line to
    people at this machine; ``log`` keeps what workers write, ``history`` what is known of each job.
    ``is_admin(node)``: whether it may admit and ban.
    ``outer_world(index)``: the variables of the workers of a private agent whose command is a part
    of another launcher's world."""

    me: str
    port: int
    bind: str
    names: NodeNames
    sign: Callable[[JobSpec], JobSpec]
    worker_homes: WorkerHomes
    broker: Callable[[Path, MayDial], Broker]
    launcher: Callable[..., Launch]
    confinement: Confinement
    environments: Environments
    data: DataSets
    links: PeerLinks
    plane: ControlPlane
    surveyor: Surveyor
    offers: Offers
    vouching: Vouching
    commands: Commands
    log: JobLog
    history: JobHistory
    note: Callable[[str], None]
    is_admin: Callable[[str], bool]
    outer_world: OuterWorld | None = None
