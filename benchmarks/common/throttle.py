"""A process slowed by a CPU limit: a control group's quota, or stops and starts from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from potluck._core.system import SIGCONT, SIGSTOP

PERIOD_S = 0.010
GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def throttled(pid: int, share: float, how: str = "auto") -> Iterator[str]:
    """Let process ``pid`` have only ``share`` of one core; yields the way it is done.

    ``how``: ``cgroup`` (Linux, root, version 1 or 2), ``signals`` (SIGSTOP and SIGCONT), ``auto``.
    """
    group = make_group(pid, share) if how in ("auto", "cgroup") else None
    if group is None:
        if how == "cgroup":
            raise OSError("no control group with a CPU quota can be made here: are you root?")
        with duty_cycle(pid, share):
            yield "SIGSTOP and SIGCONT"
        return
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield "CPU quotas of control groups"
    finally:
        with contextlib.suppress(OSError):  # the process may have ended, and then left by itself
            (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def make_group(pid: int, share: float) -> Path | None:
    """A new control group for ``pid``, held to ``share`` of a core; None if that can't be."""
    period = round(PERIOD_S * 1e6)
    quota = round(share * period)
    name = f"potluck-bench-{os.getpid()}-{pid}"
    # Its share is small, but it comes before whatever else this machine is doing.
    quotas = {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}
    for root, settings in (
        (GROUPS / "cpu", quotas | {"cpu.shares": "100000"}),
        (GROUPS, {"cpu.max": f"{quota} {period}", "cpu.weight": "10000"}),
    ):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for setting, value in settings.items():
                (group / setting).write_text(value)
            return group
        except OSError:
            group.rmdir()
    return None


@contextlib.contextmanager
def duty_cycle(pid: int, share: float) -> Iterator[None]:
    """Let the process run for ``share`` of each period."""
    ended = threading.Event()

    def cycle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.is_set():
                os.kill(pid, SIGSTOP)
                time.sleep(PERIOD_S * (1 - share))
                os.kill(pid, SIGCONT)
                time.sleep(PERIOD_S * share)

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
