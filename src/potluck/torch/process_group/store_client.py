"""A rank's link to the store on rank 0."""

from __future__ import annotations

import threading
import time

from potluck._core.engine.mesh import Switchboard, check_node_of
from potluck._core.transport.blocking import recv_exactly, send_all
from potluck._core.transport.handshake import connect
from potluck._core.types import Group
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.greeting import Hello
from potluck.torch.process_group.store_messages import (
    ANSWER,
    KIND,
    MESSAGE_S,
    REQUEST,
    Answer,
    StoreRequest,
)


class StoreClient:
    """The store on another rank than 0."""

    def __init__(self, group: Group, switchboard: Switchboard, timeout_s: float) -> None:
        """LinkError if rank 0 has no link within ``timeout_s``, or another node answers there."""
        server = group.members[0]
        hello = Hello(
            kind=KIND,
            job=group.job,
            epoch=group.epoch,
            rank=group.rank,
            to_rank=0,
            worker=group.me.worker,
        )
        self._link, _ = connect(
            server.host,
            server.port,
            hello,
            switchboard.credentials,
            deadline=time.monotonic() + timeout_s,
            max_retries=None,
        )
        check_node_of(group, 0, self._link)
        self._lock = threading.Lock()

    def ask(self, request: StoreRequest, deadline: float) -> Answer:
        """The answer to a request; LinkError if there is none by ``deadline``."""
        with self._lock:
            send_all(self._link, REQUEST.encode(request), time.monotonic() + MESSAGE_S)
            while True:
                length = ANSWER.length(recv_exactly(self._link, PREFIX_BYTES, deadline))
                body = recv_exactly(self._link, length, time.monotonic() + MESSAGE_S)
                answer = ANSWER.decode(body)
                if answer.number == request.number:
                    return answer

    def close(self) -> None:
        self._link.close()
