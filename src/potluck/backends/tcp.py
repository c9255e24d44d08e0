"""What every backend over TCP has: one listener, one switchboard, one way to a communicator."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Iterator

from potluck.cluster.trust.credentials import load_credentials
from potluck.engine.communicator import Communicator
from potluck.engine.mesh import Mesh, Switchboard
from potluck.errors import ConfigurationError
from potluck.metrics import Metrics
from potluck.settings import Settings
from potluck.transport.credentials import Credentials
from potluck.transport.listener import Listener
from potluck.types import Group
from potluck.wire.messages import PLAIN

_log = logging.getLogger(__name__)


class TcpBase:
    """This process's listener and the communicators that answer on it, one after the other."""

    def __init__(
        self,
        host: str,
        port: int,
        settings: Settings,
        credentials: Credentials | None = None,
    ) -> None:
        self.settings = settings
        self.credentials = credentials or load_credentials(settings)
        if settings.wire == PLAIN:
            _say_that_links_are_plain()
        self.metrics = Metrics()
        self.listener = Listener(
            host,
            port,
            self.credentials,
            hello_timeout_s=settings.hello_timeout_s,
            max_pending=settings.max_pending,
            use_windows=settings.use_windows,
        )
        self.switchboard = Switchboard(
            self.listener, self.credentials, wait_s=settings.connection_timeout_s
        )

    @property
    def port(self) -> int:
        return self.listener.port

    def open(self, group: Group, *, are_listening: bool = True) -> Communicator:
        """The communicator of ``group``; earlier groups' connections are refused from now on.

        ``are_listening``: every member is known to be there, so a refused connection means that it
        has died. Otherwise it may not have been started yet, and is called until the deadline.
        """
        settings = self.settings
        mesh = Mesh(
            group,
            self.switchboard,
            connect_s=settings.peer_timeout_s,
            max_retries=settings.max_retries if are_listening else None,
            window=(settings.window_slots, settings.window_slot_bytes)
            if settings.use_windows
            else None,
            wire=settings.wire,
        )
        return Communicator.open(
            group,
            mesh,
            metrics=self.metrics,
            segment_bytes=settings.segment_bytes,
            max_early_bytes=settings.max_early_bytes,
            use_windows=settings.use_windows,
        )

    def close(self) -> None:
        self.switchboard.close()


@functools.cache
def _say_that_links_are_plain() -> None:
    """Once per process, wherever the setting came from."""
    _log.warning(
        "POTLUCK_WIRE=plain: links between workers are not encrypted. Only holders of the secret "
        "can join, but whoever is on the wire reads the tensors and can change them; use it on a "
        "cable that you trust"
    )


@contextlib.contextmanager
def taking_master_port(port: int) -> Iterator[None]:
    """Say of a port that is taken where it came from."""
    try:
        yield
    except ConfigurationError as error:
        if not is_port_taken(error):
            raise
        raise ConfigurationError(
            f"rank 0 can't listen at MASTER_PORT={port}: another program does, maybe an earlier "
            "run that has not ended; set another MASTER_PORT on all ranks"
        ) from error


def is_port_taken(error: ConfigurationError) -> bool:
    """Whether a listener could not be made because another program has its port."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
