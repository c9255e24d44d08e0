"""The part of a machine that its owner gives to the cluster's jobs. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from potluck._core.printable import bytes_in
from potluck._core.settings import Settings
from potluck._core.wire.facts import NodeFacts
from potluck.errors import ConfigurationError

MIN_MEMORY = 256 << 20
"""Less than that, Python, numpy and potluck don't start."""

_GPU = re.compile(r"[A-Za-z0-9/_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """All jobs together get ``cpus`` processors and ``memory_bytes`` (0: all there is), the
    accelerators ``gpus`` (indices as the driver counts, or its ids; None: all), and run with
    priority ``nice``."""

    cpus: int = 0
    memory_bytes: int = 0
    nice: int = 0
    gpus: tuple[str, ...] | None = None

    def reduced(self, facts: NodeFacts) -> NodeFacts:
        """``facts`` about the machine, as the cluster is to see them."""
        memory = facts.memory_bytes
        return msgspec.structs.replace(
            facts,
            cores=min(facts.cores, self.cpus or facts.cores),
            memory_bytes=min(memory, self.memory_bytes or memory),
            accelerators=self._given(facts.accelerators),
        )

    def _given(self, accelerators: tuple[str, ...]) -> tuple[str, ...]:
        if self.gpus is None:
            return accelerators
        if not all(gpu.isdecimal() for gpu in self.gpus):
            return accelerators[: len(self.gpus)]
        indices = [int(gpu) for gpu in self.gpus]
        return tuple(accelerators[index] for index in indices if index < len(accelerators))

    def processors(self, usable: Sequence[int]) -> list[int]:
        """Which of the ``usable`` processors the jobs get: the last ones, because systems begin
        their own work on the first."""
        return sorted(usable)[-self.cpus :] if self.cpus else []

    def describe(self) -> str:
        """The limits in words; empty without any."""
        parts = []
        if self.cpus:
            parts.append(f"{self.cpus} processor{'s' if self.cpus > 1 else ''}")
        if self.memory_bytes:
            parts.append(f"{in_units(self.memory_bytes)} of memory")
        if self.gpus is not None:
            parts.append(f"GPU {','.join(self.gpus)}" if self.gpus else "no GPU")
        if self.nice:
            parts.append(f"nice {self.nice}")
        return ", ".join(parts)


def limits_of(settings: Settings, *, cores: int, memory_bytes: int) -> Limits:
    """The limits in ``settings``, on a machine with so many ``cores`` and so much memory.
    ConfigurationError if the machine has less."""
    if settings.cpus > cores:
        raise ConfigurationError(f"--cpus {settings.cpus}: this machine has {cores}")
    return Limits(
        cpus=settings.cpus if settings.cpus < cores else 0,
        memory_bytes=parse_memory(settings.memory, memory_bytes) if settings.memory else 0,
        nice=settings.nice,
        gpus=_parse_gpus(settings.gpus),
    )


def parse_memory(text: str, total: int) -> int:
    """The bytes that ``text`` means on a machine with ``total`` bytes: ``8GiB``, ``500M``, ``50%``;
    units are powers of 1024. ConfigurationError if it means nothing, too little or too much."""
    wanted = text.strip()
    if wanted.endswith("%") and wanted[:-1].isdecimal() and 0 < int(wanted[:-1]) <= 100:
        size = total * int(wanted[:-1]) // 100
    else:
        size = parse_size(text, ", or a part, 50%")
    _check_size(size, text)
    if size > total:
        raise ConfigurationError(f"--memory {text}: this machine has {in_units(total)}")
    return size


def parse_size(text: str, or_else: str = "") -> int:
    """The bytes that ``text`` means: ``8GiB``, ``500M``; units are powers of 1024.
    ConfigurationError, with what else may be written (``or_else``), if it means none."""
    size = bytes_in(text)
    if size is None:
        raise ConfigurationError(f"--memory {text!r}: write a size, 8GiB or 500M{or_else}")
    _check_size(size, text)
    return size


def _check_size(size: int, text: str) -> None:
    if size < MIN_MEMORY:
        raise ConfigurationError(
            f"--memory {text}: a worker needs at least {in_units(MIN_MEMORY)} to start"
        )


def _parse_gpus(text: str) -> tuple[str, ...] | None:
    if not text.strip():
        return None
    if text.strip() == "none":
        return ()
    gpus = tuple(part.strip() for part in text.split(","))
    if not all(_GPU.fullmatch(gpu) for gpu in gpus):
        raise ConfigurationError(
            f"--gpus {text!r}: write none, or the numbers or ids of GPUs with commas: 0,2"
        )
    return gpus


def in_units(size: int) -> str:
    """``8 GiB``, ``1.5 GiB``, ``256 MiB``."""
    power = 3 if size >= 1 << 30 else 2
    return f"{size / 1024**power:.3g} {'GiB' if power == 3 else 'MiB'}"
