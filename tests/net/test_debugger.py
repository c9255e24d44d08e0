"""``breakpoint()`` in a worker of a cluster, reached by ``potluck attach --rank`` from other
machines than the worker's."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.machines import Machine, cluster_of, form
from support.pages import DOCS
from support.terminal import Terminal

pytestmark = pytest.mark.needs_root_netns

STOPS = """
import sys, numpy as np, potluck
ctx = potluck.init()
secret = 20 + ctx.rank
if ctx.rank == 1:
    breakpoint()
    print("rank 1 goes on", flush=True)
total = ctx.all_reduce(np.array([1.0]))
print("counted", int(total[0]), "here", secret, flush=True)
ctx.close()
"""


def attach(machine: Machine, *arguments: str) -> Terminal:
    """``potluck attach ARGUMENTS`` on a terminal on this machine."""
    variables = [f"{name}={value}" for name, value in machine.environment.items()]
    words = ["env", *variables, *potluck_command(), "attach", *arguments]
    return Terminal(*machine.host.command(words))


@contextlib.contextmanager
def halted(
    starter: Machine, tmp_path: Path, script: str = STOPS, *options: str
) -> Iterator[tuple[Command, str]]:
    """A job of which rank 1 sits at its breakpoint, and its id."""
    path = tmp_path / "code" / "train.py"
    path.parent.mkdir()
    path.write_text(script)
    with starter.run("--plain", *options, path) as run:
        line = run.wait_for("potluck attach ")
        assert re.search(r"\[ ?1 \w+\] potluck: at a breakpoint \(train.py, line \d+\), and", line)
        yield run, line.split("potluck attach ")[1].split(" ")[0]


def rank_1_of(machines: list[Machine], run: Command) -> Machine:
    """The machine on which rank 1 is."""
    line = run.wait_for("at a breakpoint")
    name = re.search(r"\[ ?1 (\w+)\]", line)
    assert name, line
    return next(each for each in machines if each.name == name[1])


def refused(machine: Machine, *arguments: str) -> str:
    """What `potluck attach ARGUMENTS` says, which fails."""
    done = machine.runs("attach", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join(done.stderr.split())


def test_a_rank_is_debugged_from_the_starter_while_the_others_wait(tmp_path: Path) -> None:
    """Longer than their timeout; by one command at a time, of the starter or the owner."""
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        starter = machines[0]
        with halted(starter, tmp_path, STOPS, "--peer-timeout", "3") as (run, job):
            there = rank_1_of(machines, run)
            assert there is not starter
            third = next(each for each in machines if each not in (starter, there))
            said = refused(third, "--rank", "1", job)
            assert (
                f"it is debugged on {starter.name}, which started it, and on {there.name}" in said
            )
            assert "it runs on no machine that is there" in refused(starter, "--rank", "7", job)
            with attach(starter, "--rank", "1", job) as terminal:
                terminal.read_until(lambda drawn: "(Pdb)" in drawn)
                said = refused(there, "--rank", "1", job)
                assert f"a command on {starter.name} debugs this rank" in said
                terminal.type("p secret * 2\n")
                terminal.read_until(lambda drawn: "] 42" in drawn)
                terminal.type("print(chr(27) + '[2J', 'x' * 200_000)\n")
                terminal.read_until(lambda drawn: "x" * 1000 in drawn)
                assert "\x1b[2J" not in terminal.drawn
                terminal.type("c\n")
                terminal.read_until(lambda drawn: "rank 1 goes on" in drawn)
                terminal.finish()
            assert run.finish() == 0, run.text
            assert run.text.count("counted 3") == 3


def test_a_script_goes_on_when_its_debugger_leaves_or_is_killed(tmp_path: Path) -> None:
    script = STOPS.replace("    breakpoint()\n", "    for each in range(3): breakpoint()\n")
    with cluster_of(2, tmp_path / "homes", POTLUCK_NATIVE="0") as machines:
        form(*machines)
        with halted(machines[0], tmp_path, script) as (run, job):
            for number, leave in enumerate(("\x03", "\x04", ""), 1):
                since = run.mark
                with attach(machines[0], "--rank", "1", job) as terminal:
                    terminal.read_until(lambda drawn, n=number: drawn.count("(Pdb)") >= n)
                    if leave:
                        terminal.type(leave)
                        terminal.wait()
                    else:
                        terminal.process.kill()
                run.wait_for("at a breakpoint" if number < 3 else "rank 1 goes on", since=since)
            assert run.finish() == 0, run.text


def test_a_worker_killed_or_ended_at_its_prompt(tmp_path: Path) -> None:
    with cluster_of(2, tmp_path / "homes", POTLUCK_NATIVE="0") as machines:
        form(*machines)
        with halted(machines[0], tmp_path) as (run, job):
            with attach(machines[0], "--rank", "1", job) as terminal:
                terminal.read_until(lambda drawn: "(Pdb)" in drawn)
                since = run.mark
                terminal.type("import os; os.kill(os.getpid(), 9)\n")
                run.wait_for("at a breakpoint", since=since)  # all workers began again
            with attach(machines[0], "--rank", "1", job) as terminal:
                terminal.read_until(lambda drawn: "(Pdb)" in drawn)
                run.signal(signal.SIGINT)
                assert run.finish() == 130, run.text
                terminal.finish()
            assert "KeyboardInterrupt" in run.text


PAGE = (DOCS / "jobs.md").read_text()


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    """Those behind ``laptop$``, and what is typed at the prompt that follows."""
    section = PAGE.split("## Debugging")[1].split("\n## ")[0]
    run_words, attach_words = re.findall(r"^laptop\$ potluck (.*)$", section, re.MULTILINE)
    assert run_words == "run train.py"
    [session] = re.findall(r"^laptop\$ potluck attach .*\n((?:.*\n)*?)```", section, re.MULTILINE)
    with cluster_of(2, tmp_path / "homes", POTLUCK_NATIVE="0") as machines:
        form(*machines)
        script = STOPS.replace("secret =", "loss, secret = np.zeros(32),")
        with halted(machines[0], tmp_path, script) as (run, job):
            words = [re.sub(r"^train-\w+$", job, word) for word in attach_words.split()]
            with attach(machines[0], *words[1:]) as terminal:
                for line in session.splitlines():
                    shown = re.match(r"\[1 desk\] (?!>)(.*)", line)
                    if shown is not None:
                        terminal.read_until(lambda drawn, text=shown[1]: text in drawn)
                    elif not line.startswith("["):
                        terminal.drawn = ""
                        terminal.type(f"{line}\n")
                terminal.finish()
            assert run.finish() == 0, run.text
            assert run.text.count("counted 2") == 2
