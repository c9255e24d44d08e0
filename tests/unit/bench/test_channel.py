"""Who may talk to a comparison, and what it hears when a worker is gone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from potluck.cli.bench.crew import Channel, ChannelClosed, WorkerListener


def test_only_workers_with_the_token_are_heard_and_they_are_ordered_by_rank(
    tmp_path: Path,
) -> None:
    listener = WorkerListener(tmp_path)
    callers = [
        Channel.connect(listener.address, token="wrong", rank=0),
        Channel.connect(listener.address, token=listener.token, rank=1),
        Channel.connect(listener.address, token=listener.token, rank=0),
    ]
    heard = listener.gather((0, 1), 10.0, lambda: None)
    assert [hello["rank"] for _, hello in heard] == [0, 1]
    with pytest.raises(ChannelClosed):
        callers[0].receive(10.0)
    heard[1][0].send(do="time", calls=3)
    assert callers[1].receive(10.0) == {"do": "time", "calls": 3}
    callers[2].close()
    with pytest.raises(ChannelClosed):
        heard[0][0].receive(10.0)
    for channel in (*callers, *(channel for channel, _ in heard), listener):
        channel.close()


def test_waiting_ends_when_a_worker_has_died_or_time_is_up(tmp_path: Path) -> None:
    listener = WorkerListener(tmp_path)
    died = threading.Event()

    def check() -> None:
        if died.is_set():
            raise RuntimeError("rank 1 ended")
        died.set()

    with pytest.raises(RuntimeError, match="rank 1 ended"):
        listener.gather((0, 1), 10.0, check)
    with pytest.raises(TimeoutError, match="rank 0, 1 did not start within"):
        listener.gather((0, 1), 0.01, lambda: None)
    listener.close()
