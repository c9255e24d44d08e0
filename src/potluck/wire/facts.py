"""What nodes tell each other of themselves and of their links, and how a path is measured.

``Facts`` travel over the links of agents. The rest is said on a connection of its own,
made for one measurement: echoes for the latency, then trains of bytes each way for the bandwidth.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.wire.format import MessageFormat
from potluck.wire.names import Name

MAX_ADDRESSES = 32
MAX_LINKS = 1024
MAX_LOAD = 64 << 10
MAX_TRAIN = 2 << 20

Figure = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Address(msgspec.Struct, frozen=True):
    """One of a node's addresses, as that node knows it: ``network`` in prefix notation, such as
    ``192.168.1.0/24``; ``bandwidth`` in bytes per second as the interface claims it, 0 if it
    does not say."""

    host: Name
    network: Name
    interface: Name = ""
    bandwidth: Figure = 0.0


class NodeFacts(msgspec.Struct, frozen=True):
    """What a node is. ``samples_per_s`` is None until it has trained."""

    node: Name
    cores: int = 1
    memory_bytes: int = 0
    accelerators: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
    samples_per_s: Figure | None = None
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()


class LinkFacts(msgspec.Struct, frozen=True):
    """One direction between two nodes: latency one way and its deviation in seconds (0: not known
    yet), bandwidth in bytes per second (0: not measured), and the interface and address of
    ``source`` that it leaves by."""

    source: Name
    target: Name
    latency_s: Figure = 0.0
    bandwidth: Figure = 0.0
    deviation_s: Figure = 0.0
    interface: Name = ""
    address: Name = ""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """What I am, and my links to others: ``source`` of each is me."""

    node: NodeFacts
    links: Annotated[tuple[LinkFacts, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()


class Measured(msgspec.Struct, frozen=True, tag=True):
    """I measured the path between us: bytes per second from you to me and from me to you."""

    from_you: Figure
    to_you: Figure


# On a connection made for one measurement; who called asks, the other answers.


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Send this back."""

    number: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """A piece of a train of bytes; after the ``last`` one, answer with TrainArrived."""

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_LOAD)]
    last: bool = False


class TrainArrived(msgspec.Struct, frozen=True, tag=True):
    """A train of ``nbytes`` arrived, its second half in ``seconds``."""

    nbytes: int
    half_bytes: int
    seconds: Figure


class SendTrain(msgspec.Struct, frozen=True, tag=True):
    """Send me a train of so many bytes."""

    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRAIN)]


Measuring = Echo | Load | TrainArrived | SendTrain

MEASURING: MessageFormat[Measuring] = MessageFormat(
    Measuring, limit=MAX_LOAD + 256, name="a measuring message"
)
