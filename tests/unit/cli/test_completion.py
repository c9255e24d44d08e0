"""What the shell offers after Tab."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from potluck._core.wire.local import JobsReply, NodeInfo, NodesReply
from potluck.cli.completion import complete_job, complete_node
from potluck.errors import LinkError
from support.commands import potluck_command


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """The answers of this machine's agent, by request; an error where there is none."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    monkeypatch.setenv("POTLUCK_NAME", "here")
    answers: dict[str, object] = {}

    async def ask_agent(settings: object, request: object, *, timeout_s: float) -> object:
        assert timeout_s <= 0.2
        found = answers.get(type(request).__name__)
        if found is None:
            raise LinkError("no answer")
        return found

    monkeypatch.setattr("potluck._core.cluster.links.local.ask_agent", ask_agent)
    return answers


def seen(*names: str) -> NodesReply:
    nodes = (
        NodeInfo(f"{number}" * 64, name, "member", "up", "10.0.0.7", 0.3, "", "", "")
        for number, name in enumerate(names)
    )
    return NodesReply("0" * 64, 1, 52415, "9c41", 7, "", tuple(nodes), (), ())


def test_a_damaged_home_and_no_agent_are_no_error(agent: dict[str, object], tmp_path: Path) -> None:
    assert complete_node("") == ["here"]
    (tmp_path / "node_keypair").write_bytes(b"\xff")
    assert complete_node("") == []
    assert complete_job("") == []


def test_jobs_are_those_of_the_agent_that_begin_so(agent: dict[str, object]) -> None:
    agent["JobsRequest"] = JobsReply((), ("digits-1a2b", "digits-77aa", "other-1"))
    assert complete_job("digits-") == ["digits-1a2b", "digits-77aa"]
    assert complete_job("") == ["digits-1a2b", "digits-77aa", "other-1"]


def test_names_that_a_shell_would_run_or_that_two_machines_have_become_ids(
    agent: dict[str, object],
) -> None:
    agent["NodesRequest"] = seen("attic", "$(reboot)", "twin", "twin", "-rf")
    agent["JobsRequest"] = JobsReply((), ("`reboot`", "a b", "fine-1"))
    ids = [12 * str(number) for number in (1, 2, 3, 4)]
    assert complete_node("") == sorted(["here", "attic", *ids])
    assert complete_node("at") == ["attic"]
    assert complete_job("") == ["fine-1"]


def test_the_shell_gets_names_from_the_command_itself(tmp_path: Path) -> None:
    """As the script calls it that ``potluck --install-completion`` writes for bash."""
    asked = {
        "_POTLUCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "potluck ban he",
        "COMP_CWORD": "2",
        "POTLUCK_HOME": str(tmp_path),
        "POTLUCK_NAME": "hearth",
    }
    program = "import sys; sys.argv[0] = 'potluck'; from potluck.cli.main import app; app()"
    command = [*potluck_command()[:2], program]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == ["hearth"]
    assert done.stderr == ""
