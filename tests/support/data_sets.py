"""The data sets of machines whose stores reach each other in memory."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec

from potluck._core.cluster.data_sets.job_data import JobData
from potluck._core.cluster.data_sets.sets import DataSets
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import jobs
from support.requests import Nodes

ADA, BOB, EVE = "ada", "bob", "eve"
P = ParamSpec("P")


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Machines:
    """The data sets of several machines, whose stores reach each other."""

    def __init__(self, root: Path, quota: int = 1 << 30) -> None:
        self.nodes, self.notes, self.noted = Nodes(), list[str](), asyncio.Event()
        self.nodes.patience_s = 0.5
        self.sets = {
            me: DataSets(root / me, me, self.nodes.store(root / me, me), quota)
            for me in (ADA, BOB, EVE)
        }
        self.pets = root / "pets"
        self.pets.mkdir()
        (self.pets / "large").write_bytes(os.urandom(5 << 20))
        (self.pets / "small").write_text("small")

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()

    async def spec(self, *, keeps_files: bool = False) -> jobs.JobSpec:
        named = [("pets", str(self.pets))]
        data = await self.sets[ADA].take_in(named, self.notes.append, travels=True)
        return jobs.JobSpec(
            job="job",
            script="train.py",
            package=bytes(32),
            starter=ADA,
            versions=own_versions(),
            data=data,
            keeps_files=keeps_files,
        )

    def job(self, me: str, spec: jobs.JobSpec, **how: Any) -> JobData:
        """The data of a job that runs on ada and bob."""
        data = JobData(self.sets[me], spec, "key", called=str, note=self.note, **how)
        data.members([ADA, BOB])
        return data
