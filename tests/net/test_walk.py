"""docs/walk.md, typed as it stands by a person at two machines."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.hosts import Host, Network
from support.pages import DOCS, snippets
from support.terminal import Terminal

pytestmark = pytest.mark.needs_root_netns

BLOCKS = re.findall(r"```\n((?:desk|laptop)\$ .*?)```", (DOCS / "walk.md").read_text(), re.DOTALL)
"""What one sees on a screen, each with the command in its first line."""


class Person:
    """Types the commands of the walk at ``host``, which is called ``name``."""

    def __init__(self, host: Host, name: str, root: Path, stack: ExitStack) -> None:
        self.name = name
        self.folder = root / name / "work"
        self.folder.mkdir(parents=True)
        self._host = host
        self._stack = stack
        self._variables = {
            "HOME": str(root / name),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "POTLUCK_HOME": str(root / name / ".potluck"),
            "POTLUCK_NAME": name,
            "POTLUCK_USE_SHARED_MEMORY": "no",  # hosts share one kernel, machines don't
            "POTLUCK_ALLOW_ROOT": "1",  # making hosts takes root
        }

    def types(self, command: str, job: str = "") -> Terminal:
        """The walk's ``command``, which stands there for this machine, with the id of ``job`` in
        the place of the one there."""
        assert any(block.startswith(f"{self.name}$ {command}\n") for block in BLOCKS), command
        command = command.replace("save-14e60dab", job)
        set_up = shlex.join(f"{name}={value}" for name, value in self._variables.items())
        line = f"cd {shlex.quote(str(self.folder))}; exec env {set_up} {command}"
        return self._stack.enter_context(Terminal(*self._host.command(["bash", "-c", line])))


def answers(command: str) -> list[tuple[re.Pattern[str], str]]:
    """The questions of ``command`` in the walk, and what is typed there."""
    block = next(each for each in BLOCKS if each.split("\n")[0].endswith(f"$ {command}"))
    found = []
    for question, answer in re.findall(r"^(.*\[y/N\]:?) (.*)$", block, re.MULTILINE):
        words = re.escape(question).replace("as\\ ada", "as .*")
        found.append((re.compile(words), answer))
    return found


def answer(terminal: Terminal, question: re.Pattern[str], word: str) -> None:
    terminal.read_until(lambda _: question.search(terminal.text) is not None)
    assert question.search(terminal.text), terminal.text
    terminal.type(f"{word}\n")


def paired(desk: Person, laptop: Person) -> tuple[Terminal, Terminal]:
    """The pairing, to its end at both machines."""
    pair = desk.types("potluck pair")
    shown = re.compile(r"\b\d{3}-\d{3}-\d{3}\b")
    pair.read_until(lambda _: "Waiting (Ctrl-C ends it)" in pair.text)
    join = laptop.types("potluck join")
    typed = re.compile("The code that `potluck pair` shows on the other machine: ")
    answer(join, typed, shown.search(pair.text)[0])
    for asked in zip(answers("potluck pair"), answers("potluck join"), strict=True):
        for terminal, (question, word) in zip((pair, join), asked, strict=True):
            answer(terminal, question, word)
    assert pair.finish() == 0, pair.text
    assert join.finish() == 0, join.text
    return pair, join


def test_the_walk_typed_as_it_stands_trains_on_both_machines(tmp_path: Path) -> None:
    with ExitStack() as stack:
        left, right = stack.enter_context(Network(2))
        desk = Person(left, "desk", tmp_path, stack)
        laptop = Person(right, "laptop", tmp_path, stack)
        (desk.folder / "script.py").write_text(snippets("walk.md")[0])

        alone = desk.types("potluck run --workers 2 script.py")
        assert alone.finish() == 0, alone.text
        assert "[0] rank 0 of 2: 1.5" in alone.text

        agent = desk.types("potluck up")
        agent.read_until(lambda _: "founds a cluster" in agent.text)

        pair, join = paired(desk, laptop)
        assert "laptop is in, as member" in pair.text
        assert "To take part, run: potluck up" in join.text

        second = laptop.types("potluck up")
        second.read_until(lambda _: "laptop (" in second.text and "joins" in second.text)
        status = desk.types("potluck status")
        assert status.finish() == 0, status.text
        assert re.search(r"laptop │ member │ up", status.text), status.text
        assert "engine: " in status.text

        both = desk.types("potluck run script.py")
        assert both.finish() == 0, both.text
        assert "starting 2 workers on desk, laptop" in both.text
        assert re.search(r"\[0 desk\] rank 0 of 2: 1.5", both.text), both.text
        assert re.search(r"\[1 laptop\] rank 1 of 2: 1.5", both.text), both.text

        (desk.folder / "save.py").write_text(snippets("walk.md")[1])
        saving = desk.types("potluck run save.py")
        assert saving.finish() == 0, saving.text
        told = r"written on desk \(1, 11 bytes\), laptop \(1, 11 bytes\): potluck fetch (save-\w+)"
        (job,) = re.findall(told, " ".join(saving.text.split()))
        fetching = desk.types("potluck fetch save-14e60dab", job)
        assert fetching.finish() == 0, fetching.text
        assert "2 files (22 bytes) brought into" in fetching.text
        brought = {path.name: path.read_text() for path in (desk.folder / job).iterdir()}
        assert brought == {"rank.desk.txt": "rank 0 of 2", "rank.laptop.txt": "rank 1 of 2"}

        example = (DOCS.parent / "examples" / "digits.py").read_text()
        short = example.replace("EPOCHS, ACCURACY = 30, 0.97", "EPOCHS, ACCURACY = 15, 0.97")
        assert short != example, "the same accuracy in half the epochs"
        (desk.folder / "digits.py").write_text(short)
        training = desk.types("potluck run digits.py")
        assert training.finish() == 0, training.text
        assert "starting 2 workers on desk, laptop" in training.text
        assert re.search(r"parameters +equal on all", training.text), training.text
        for terminal in (agent, second):
            assert "may scripts of" not in terminal.text, "the pairing has asked"


@pytest.mark.real_exec
def test_an_agent_that_runs_goes_over_to_the_cluster_that_its_machine_joins(
    tmp_path: Path,
) -> None:
    """As `potluck join` says."""
    with ExitStack() as stack:
        left, right = stack.enter_context(Network(2))
        desk = Person(left, "desk", tmp_path, stack)
        laptop = Person(right, "laptop", tmp_path, stack)
        agents = [each.types("potluck up") for each in (desk, laptop)]
        for agent in agents:
            agent.read_until(lambda _, agent=agent: "founds a cluster" in agent.text)
        _, join = paired(desk, laptop)
        assert "The agent that runs here goes over to it by itself" in join.text
        together = re.compile(
            r"epoch \d+: .*desk \(\w+\), laptop|epoch \d+: .*laptop \(\w+\), desk"
        )
        for agent in agents:
            agent.read_until(lambda _, agent=agent: together.search(agent.text) is not None)
            assert together.search(agent.text), agent.text
        (desk.folder / "script.py").write_text(snippets("walk.md")[0])
        both = desk.types("potluck run script.py")
        assert both.finish() == 0, both.text
        assert "starting 2 workers on desk, laptop" in both.text
