"""``Confinement``: holds the workers of this machine to the part of it that the owner gives.

In a control group where one can be made (``cgroups.py``); else each worker by itself: the system
gives it fewer processors (which it could take back) and bounds its private memory. A worker begins
under its limits: ``cluster/jobs/shim.py`` sets them before the script starts.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from potluck._core.cluster.sharing import cgroups
from potluck._core.cluster.sharing.limits import Limits, in_units, limits_of
from potluck._core.cluster.sharing.sandbox import Sandbox
from potluck._core.settings import Settings
from potluck._core.system import usable_cpus
from potluck._core.wire.facts import NodeFacts
from potluck._core.wire.jobs import JobSpec

_MEMORY_ERROR = re.compile(r"MemoryError|bad_alloc|[Cc]an(?:no|')t allocate memory")


class Confinement:
    """The limits of all workers here, from construction to ``close``."""

    def __init__(
        self, limits: Limits, sandbox: Sandbox | None = None, num_gpus: Callable[[], int] = int
    ) -> None:
        """Scripts of other members run in ``sandbox``, if there is one. The machine has
        ``num_gpus()`` GPUs."""
        self.limits = limits
        self.sandbox = sandbox
        self._num_gpus = num_gpus
        self._cgroup: cgroups.Cgroup | None = None
        self._why_none = ""
        self._processors: tuple[int, ...] = ()
        """Of the part of one job; empty: those of ``limits``."""
        self._is_asked = False
        """Whether the job itself asked for no more memory than that."""
        self._parts: dict[str, Confinement] = {}
        """By job: the part of each that does not get all."""
        if limits.cpus or limits.memory_bytes:
            made = cgroups.make(limits)
            if isinstance(made, str):
                self._why_none = made
            else:
                self._cgroup = made

    def part_of(self, spec: JobSpec) -> Confinement:
        """What the workers of ``spec`` get of this machine, until ``give_back``: all, or the cores,
        GPUs and memory that it asked for, those that the fewest other jobs have."""
        if not spec.cores or spec.job in self._parts:
            return self._parts.get(spec.job, self)
        others, limits = list(self._parts.values()), self.limits
        cpus = limits.processors(list(usable_cpus())) or sorted(usable_cpus())
        gpus = limits.gpus or tuple(map(str, range(self._num_gpus())))
        used = Counter(cpu for each in others for cpu in each._processors)
        busy = Counter(gpu for each in others for gpu in each.limits.gpus or ())
        part = copy.copy(self)
        part._processors = tuple(sorted(sorted(cpus, key=used.__getitem__)[: spec.cores]))
        part.limits = replace(
            limits,
            cpus=len(part._processors),
            gpus=tuple(sorted(gpus, key=busy.__getitem__)[: spec.gpus]) if gpus else limits.gpus,
            memory_bytes=spec.memory_bytes or limits.memory_bytes,
        )
        part._is_asked = bool(spec.memory_bytes)
        self._parts[spec.job] = part
        return part

    def give_back(self, job: str) -> None:
        """The workers of ``job`` have ended."""
        self._parts.pop(job, None)

    def describe(self) -> str:
        """The limits, and what enforces them; empty without limits."""
        text = self.limits.describe()
        if self._cgroup is not None:
            text += " (by a control group)"
        elif self._why_none:
            text += f" (by limits of each worker: {self._why_none}"
            text += "; not enforced: shared memory)" if self.limits.memory_bytes else ")"
        sandbox = "a sandbox for scripts of others" if self.sandbox is not None else ""
        return ", ".join(filter(None, (text, sandbox)))

    def sandbox_of(self, spec: JobSpec, me: str) -> Sandbox | None:
        """The sandbox in which node ``me`` runs the workers of ``spec``; None for its own jobs."""
        return None if spec.is_local or spec.starter == me else self.sandbox

    def facts(self, facts: NodeFacts) -> NodeFacts:
        """``facts`` about this machine, as the cluster is to see them."""
        reduced = self.limits.reduced(facts)
        return msgspec.structs.replace(reduced, limits=self.describe()[:256])

    def processors(self) -> int:
        """The number of processors that workers here share."""
        return self.limits.cpus or len(usable_cpus())

    def variables(self) -> dict[str, str]:
        """Variables of all workers, by which libraries see the GPUs that are given."""
        gpus = self.limits.gpus
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        return {} if gpus is None else dict.fromkeys(names, ",".join(gpus))

    def memory_of(self, num_workers: int) -> int:
        """The bytes of memory that each of ``num_workers`` gets by itself: 0 where nothing bounds
        it, and where a control group bounds them all together."""
        is_held = self._cgroup is not None and not self._is_asked
        return 0 if is_held else self.limits.memory_bytes // num_workers

    def orders(self, num_workers: int) -> dict[str, object]:
        """What ``shim.py`` has to set for a worker, one of ``num_workers`` of its job here."""
        limits = self.limits
        orders: dict[str, object] = {}
        if self._cgroup is not None:
            orders["cgroup"] = str(self._cgroup.path)
        if memory := self.memory_of(num_workers):
            orders["data"] = memory
        if limits.cpus:
            orders["cpus"] = list(self._processors) or limits.processors(list(usable_cpus()))
        if limits.nice:
            orders["nice"] = limits.nice
        return orders

    def is_memory_error(self, line: str) -> bool:
        """Whether a line that a worker wrote is an error for lack of memory."""
        return bool(self.limits.memory_bytes) and _MEMORY_ERROR.search(line) is not None

    def why_ended(self, code: int, *, said_so: bool) -> str:
        """Why a worker that ended with ``code`` did, if the limits were the reason; ``said_so``: it
        wrote that it got no more memory."""
        if not self.limits.memory_bytes or code == 0:
            return ""
        was_killed = self._cgroup is not None and self._cgroup.was_out_of_memory() and code < 0
        if not (was_killed or said_so):
            return ""
        size = in_units(self.limits.memory_bytes)
        if self._is_asked:
            return f"out of memory: this job asked for {size} on each machine (--memory)"
        return (
            f"out of memory: the owner of this machine gives {size} to all jobs (potluck up "
            "--memory)"
        )

    async def close(self) -> None:
        """The workers have ended."""
        if self._cgroup is not None:
            self._cgroup.close()


def own_sandbox(settings: Settings, limits: Limits) -> Sandbox | None:
    """The sandbox that ``settings`` ask for; ConfigurationError if there can't be one here."""
    if not settings.sandbox:
        return None
    readable = (Path(part.strip()) for part in settings.sandbox_read.split(",") if part.strip())
    return Sandbox(settings.home, readable, limits.gpus, has_network=settings.sandbox_network)


def own_limits(settings: Settings) -> Limits:
    """The limits in ``settings``; ConfigurationError if this machine has less."""
    memory = psutil.virtual_memory().total
    return limits_of(settings, cores=len(usable_cpus()), memory_bytes=memory)
