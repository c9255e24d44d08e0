"""The messages in which agents tell each other the services of programs outside of jobs.

They are not broadcast: an agent asks the others when a program of its machine looks for a service.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.printable import MAX_NAME, PRINTABLE
from potluck._core.wire.names import MachineName
from potluck._core.wire.nodes import Count

MAX_SERVICES = 64
"""Of the programs of one machine, all together."""
MAX_METHODS = 64
MAX_SERVED_BYTES = 64 << 10
"""Of one machine's services, as they are sent."""

ServiceName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME, pattern=PRINTABLE)]


class ServedService(msgspec.Struct, frozen=True):
    """A service of a program that listens on TCP ``port`` of its machine."""

    name: ServiceName
    methods: Annotated[tuple[ServiceName, ...], msgspec.Meta(max_length=MAX_METHODS)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


Served = Annotated[tuple[ServedService, ...], msgspec.Meta(max_length=MAX_SERVICES)]


class ServicesWanted(msgspec.Struct, frozen=True, tag=True):
    """A request for the service ``name`` of the receiver's machine, or for all of its services if
    that is empty; answered with ServicesHere of the same ``number``."""

    number: Count
    name: MachineName = ""


class ServicesHere(msgspec.Struct, frozen=True, tag=True):
    """The services of the sender's machine that were asked for."""

    number: Count
    services: Served = ()
