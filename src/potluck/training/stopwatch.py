"""How long a rank works for its share of a step, as opposed to waiting for others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.context import DistributedContext

MAX_STRETCH = 10.0


def busy_s(wall_s: float, cpu_s: float, waited_s: float, waited_cpu_s: float) -> float:
    """Seconds of work in ``wall_s``: what was not waiting, and this rank's part of the transfers.

    While a rank waits for a collective its own half of the transfers may run: that is CPU time
    (``waited_cpu_s``), and takes as much longer by the clock as computing did, where the process
    gets only a part of a core.
    """
    computed_s, computed_cpu_s = wall_s - waited_s, cpu_s - waited_cpu_s
    stretch = computed_s / computed_cpu_s if computed_cpu_s > 0 else 1.0
    transfers_s = waited_cpu_s * min(max(stretch, 1.0), MAX_STRETCH)
    return computed_s + min(transfers_s, waited_s)


class Stopwatch:
    """Measures ``busy_s`` from ``start`` on."""

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self.start()

    def start(self) -> None:
        """Begin again."""
        waits = self._ctx.waits
        self.began = time.monotonic()
        self._cpu_s = time.process_time()
        self._waited_s, self._waited_cpu_s = waits.seconds, waits.cpu_s

    def busy_s(self) -> float:
        """Seconds of work since the start."""
        waits = self._ctx.waits
        return busy_s(
            time.monotonic() - self.began,
            time.process_time() - self._cpu_s,
            waits.seconds - self._waited_s,
            waits.cpu_s - self._waited_cpu_s,
        )
