"""``GlooBackend`` and ``NcclBackend``: their requirements, and the rendezvous of their ranks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from potluck._core import hints
from potluck._core.backends.agent import FIRST_GROUP_S
from potluck._core.backends.base import StaticBackend
from potluck._core.backends.external import ExternalCommunicator
from potluck._core.backends.fixed import is_our_world, join_world
from potluck._core.backends.launchers import read_launched_rank
from potluck._core.backends.library import Library
from potluck._core.backends.store_rendezvous import meet
from potluck._core.backends.torchdist.store import ErrorChannel, open_store
from potluck._core.optional import require
from potluck._core.settings import Settings, load_settings
from potluck.errors import ConfigurationError


class _TorchBackend(StaticBackend[ExternalCommunicator], ABC):
    """One rank of a fixed group that a launcher's variables describe."""

    name = ""

    @hints.arguments({})
    def __init__(
        self,
        *,
        settings: Settings | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        require("torch", "torch")
        self._settings = settings or load_settings()
        self._environment = environment
        self._launched = read_launched_rank(environment)
        self._store: Any = None
        self.no_next_group = (
            f"a group of {self.name} has no next group; start the script with `potluck run` and "
            "backend='auto' to survive the loss of a worker"
        )

    def _form(self, timeout_s: float) -> ExternalCommunicator:
        launched = self._launched
        if is_our_world(self._environment, launched.rank, launched.world_size):
            # The agent names the missing ranks, and starts all of them again after a loss.
            host, port = join_world(max(timeout_s, FIRST_GROUP_S))
            self._launched = launched = replace(launched, host=host, port=port)
        self._store = open_store(launched, timeout_s)
        group = meet(
            self._store,
            launched.rank,
            launched.world_size,
            base=None,
            local_rank=launched.local_rank,
            timeout_s=timeout_s,
            is_fresh=not launched.uses_agent_store,
        )
        errors = ErrorChannel(launched, self._store, group.job, timeout_s)
        try:
            library = self._make(f"potluck/{group.job}", errors, timeout_s)
        except BaseException:
            errors.close()
            raise
        return ExternalCommunicator.open(group, library, timeout_s=timeout_s)

    @abstractmethod
    def _make(self, prefix: str, errors: ErrorChannel, timeout_s: float) -> Library:
        """The library's group of all ranks, named ``prefix`` in the store."""

    def close(self) -> None:
        self._store = None


class GlooBackend(_TorchBackend):
    """The backend of Gloo, torch's library for CPUs. Needs PyTorch and the variables of a launcher.

    MissingDependency without PyTorch, ConfigurationError without the variables.
    """

    name = "gloo"

    def _make(self, prefix: str, errors: ErrorChannel, timeout_s: float) -> Library:
        launched = self._launched
        from potluck._core.backends.torchdist.gloo import Gloo

        return Gloo(self._store, prefix, launched.rank, launched.world_size, errors, timeout_s)


class NcclBackend(_TorchBackend):
    """The backend of NCCL, NVIDIA's library for CUDA GPUs. A rank uses the GPU of its local rank.

    CUDA tensors of that GPU are used in place; other arrays are copied to it. ConfigurationError if
    there is no GPU for this rank.
    """

    name = "nccl"

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        torch = require("torch", "torch")
        if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
            raise ConfigurationError(
                "NCCL needs a CUDA GPU and a PyTorch built for it, and there is none here; use "
                "backend='gloo' or potluck's own links (backend='auto')"
            )
        super().__init__(settings=settings, environment=environment)
        count = torch.cuda.device_count()
        if self._launched.local_rank >= count:
            raise ConfigurationError(
                f"local rank {self._launched.local_rank} has no GPU of its own: this machine has "
                f"{count}; start at most {count} workers on it, or use backend='gloo'"
            )

    def _make(self, prefix: str, errors: ErrorChannel, timeout_s: float) -> Library:
        launched = self._launched
        device = f"cuda:{launched.local_rank}"
        from potluck._core.backends.torchdist.nccl import Nccl

        return Nccl(
            self._store, prefix, launched.rank, launched.world_size, errors, timeout_s, device
        )
