"""What ``potluck run`` says before anything is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from potluck._core.cluster.run import JobClient, _run_by_agent, checked
from potluck._core.wire import local
from potluck._core.wire.local import RunRequest
from potluck.cli.run import idle_accelerators
from potluck.errors import ConfigurationError


def test_gpus_that_one_worker_leaves_idle_are_named_with_what_uses_them() -> None:
    said = idle_accelerators(("RTX 4090", "RTX 4090", "RTX 3060"), None, {})
    assert "3 GPUs" in said
    assert "--workers-per-node 3" in said


@pytest.mark.parametrize(
    ("accelerators", "workers", "environment"),
    [
        ((), None, {}),
        (("RTX 4090",), None, {}),
        (("RTX 4090", "RTX 4090"), 1, {}),
        (("RTX 4090", "RTX 4090"), None, {"CUDA_VISIBLE_DEVICES": "1"}),
        (("MI 50", "MI 50"), None, {"HIP_VISIBLE_DEVICES": "0"}),
    ],
)
def test_who_has_nothing_to_gain_or_has_chosen_is_told_nothing(
    accelerators: tuple[str, ...], workers: int | None, environment: dict[str, str]
) -> None:
    assert idle_accelerators(accelerators, workers, environment) == ""


def test_a_directory_that_was_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, gone = tmp_path / "train.py", tmp_path / "gone"
    script.write_text("")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigurationError, match="was called in has been removed; change to"):
        checked(RunRequest(script=str(script)))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_nodes": 1025}, "max_nodes"), ({"arguments": ("x",) * 1025}, "arguments")],
)
def test_a_job_that_no_agent_could_read_is_not_sent(options: dict[str, Any], said: str) -> None:
    nobody: Any = None
    request = RunRequest(script="train.py", **options)
    with pytest.raises(ConfigurationError, match=f"no agent takes this job: .*{said}"):
        asyncio.run(_run_by_agent(nobody, nobody, request, nobody))


def test_an_agent_of_the_release_before_tells_of_the_job_once_it_is_taken() -> None:
    async def run() -> None:
        watcher: Any = None
        client = JobClient("train.py", (), watcher)
        client.take(local.JobTaken("train-1", "ada"))
        assert await client.submitted == local.JobSubmitted("train-1", "ada")
        client.take(local.JobSubmitted("train-1", "bob"))  # no second one counts
        assert (await client.submitted).node == "ada"

    asyncio.run(run())
