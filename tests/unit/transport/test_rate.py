from __future__ import annotations

import logging

import pytest

from potluck._core.transport.listener import RateLimitedLog


def test_one_line_a_second_and_the_next_one_counts_the_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    log = RateLimitedLog(logging.getLogger("test"), clock=lambda: now[0])
    for _ in range(50):
        log.warning("bad caller")
        now[0] += 0.01
    now[0] += 1.0
    log.warning("bad caller")
    now[0] += 1.0
    log.warning("bad caller")
    assert [record.getMessage() for record in caplog.records] == [
        "bad caller",
        "bad caller (and 49 more since the last line)",
        "bad caller",
    ]
