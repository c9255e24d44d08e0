"""Messages about nodes and links: the facts that nodes exchange, and the measurement of a path.

``Facts`` are sent over the links of agents. A measurement has a connection of its own:
echoes measure the latency, then trains of bytes in each direction the bandwidth.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.types import Site
from potluck._core.wire.format import MessageFormat, Name

MAX_ADDRESSES = 32
MAX_LINKS = 1024
MAX_LOAD = 64 << 10
MAX_TRAIN = 2 << 20

MAX_FIGURE = 1e15
Figure = Annotated[float, msgspec.Meta(ge=0, le=MAX_FIGURE)]


class Address(msgspec.Struct, frozen=True):
    """An address of a node, as the node knows it. ``network`` is in prefix notation, such as
    ``192.168.1.0/24``; ``bandwidth`` is the interface's nominal speed in bytes per second (0:
    unknown)."""

    host: Name
    network: Name
    interface: Name = ""
    bandwidth: Figure = 0.0


class NodeFacts(msgspec.Struct, frozen=True):
    """The hardware that a node gives to jobs, by its owner's ``limits`` (in words), its speed in
    the present training (None without one), its ``engine`` (native or python), and the ``site``
    where it stands."""

    node: Name
    cores: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 1
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    accelerators: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
    samples_per_s: Figure | None = None
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    limits: Name = ""
    engine: Name = ""
    site: Site = ""


class LinkFacts(msgspec.Struct, frozen=True):
    """One direction of a link between two nodes: one-way latency and its deviation in seconds (0:
    not known yet), bandwidth in bytes per second (0: not measured), and the interface and address
    of ``source``. ``via`` is the node that relays the link; then the two don't reach each other."""

    source: Name
    target: Name
    latency_s: Figure = 0.0
    bandwidth: Figure = 0.0
    deviation_s: Figure = 0.0
    interface: Name = ""
    address: Name = ""
    via: Name = ""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """The facts of the sending node and of its links (``source`` is the sender)."""

    node: NodeFacts
    links: Annotated[tuple[LinkFacts, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The sender measured the path to the receiver: bytes per second in both directions, named from
    the sender's view."""

    from_you: Figure
    to_you: Figure


# On a connection for one measurement, from the client to the server, which answers.


class Echo(msgspec.Struct, frozen=True, tag=True):
    """A request to send this message back."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Load(msgspec.Struct, frozen=True, tag=True):
    """A piece of a train of bytes; the ``last`` piece is answered with TrainArrived."""

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_LOAD)]
    last: bool = False


class TrainArrived(msgspec.Struct, frozen=True, tag=True):
    """The answer to a train: ``nbytes`` arrived, the second half (``half_bytes``) in
    ``seconds``."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    half_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    seconds: Figure


class SendTrain(msgspec.Struct, frozen=True, tag=True):
    """A request for a train of ``nbytes``."""

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRAIN)]


Measuring = Echo | Load | TrainArrived | SendTrain

MEASURING: MessageFormat[Measuring] = MessageFormat(
    Measuring, limit=MAX_LOAD + 256, name="a measuring message"
)
