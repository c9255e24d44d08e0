"""A person who types the commands of docs/walk.md at a machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from support.hosts import Host
from support.pages import DOCS

assert sys.platform != "win32"  # which has no such terminals

from support.terminal import Terminal  # noqa: E402

BLOCKS = re.findall(r"```\n((?:desk|laptop)\$ .*?)```", (DOCS / "walk.md").read_text(), re.DOTALL)
"""What one sees on a screen, each with the command in its first line."""


class Person:
    """Types the commands of the walk at ``host``, which is called ``name``; potluck's programs are
    in ``programs`` (default: those of this environment). ``typed`` are all commands."""

    def __init__(
        self,
        host: Host,
        name: str,
        root: Path,
        stack: ExitStack,
        programs: Path = Path(sys.executable).parent,
        **variables: str,
    ) -> None:
        self.name = name
        self.folder = root / name / "work"
        self.folder.mkdir(parents=True)
        self.typed: list[str] = []
        self._host = host
        self._stack = stack
        self._variables = {
            "HOME": str(root / name),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "POTLUCK_HOME": str(root / name / ".potluck"),
            "POTLUCK_NAME": name,
            "POTLUCK_USE_SHARED_MEMORY": "no",  # hosts share one kernel, machines don't
            "POTLUCK_ALLOW_ROOT": "1",  # making hosts takes root
            **variables,
        }

    def types(self, command: str, job: str = "") -> Terminal:
        """The walk's ``command``, which stands there for this machine, with the id of ``job`` in
        the place of the one there."""
        assert any(block.startswith(f"{self.name}$ {command}\n") for block in BLOCKS), command
        command = command.replace("save-14e60dab", job)
        self.typed.append(command)
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
    """Type ``word`` when ``question`` is asked."""
    terminal.read_until(lambda _: question.search(terminal.text) is not None)
    assert question.search(terminal.text), terminal.text
    terminal.type(f"{word}\n")


def paired(desk: Person, laptop: Person) -> tuple[Terminal, Terminal]:
    """The pairing, to its end at both machines."""
    pair = desk.types("potluck pair")
    shown = re.compile(r"\b\d{3}-\d{3}-\d{3}\b")
    pair.read_until(lambda _: "Waiting (Ctrl-C ends it)" in pair.text)
    code = shown.search(pair.text)
    assert code, pair.text
    join = laptop.types("potluck join")
    asked = re.compile("The code that `potluck pair` shows on the other machine: ")
    answer(join, asked, code[0])
    for both in zip(answers("potluck pair"), answers("potluck join"), strict=True):
        for terminal, (question, word) in zip((pair, join), both, strict=True):
            answer(terminal, question, word)
    assert pair.finish() == 0, pair.text
    assert join.finish() == 0, join.text
    return pair, join
