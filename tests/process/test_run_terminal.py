"""``potluck run`` on a terminal, with a table that is drawn again and again."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from support.commands import potluck_command, run_command
from support.terminal import Terminal

TRAINING = """
import pathlib, sys, time
import numpy as np
import potluck
from potluck.training import ElasticLoop, Schedule, StateReplica

state = {"steps": np.zeros(1)}

def restore(found):
    state["steps"] = found["steps"].copy()

ctx = potluck.init()
job = ElasticLoop(ctx, Schedule(80, 8, epochs=4), StateReplica(lambda: state, restore))
for share in job:
    while job.step_number == 10 and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    if job.step_number < 10:
        time.sleep(0.2)  # so that several reports come before the pause, and there is a rate
    with job.step():
        done = ctx.all_reduce(np.ones(1), op="mean")
        job.commit(loss=0.5)
        state["steps"] = state["steps"] + done
"""


def counts(drawn: str) -> list[int]:
    """The committed samples of every table that was drawn, in order."""
    return [int(found) for found in re.findall(r"(\d+) of 320 samples", drawn)]


@pytest.mark.parametrize("chaos", ["", "kill rank 0 at step 20", "kill all at step 20"])
def test_a_training_shows_how_far_it_is_and_never_goes_back(tmp_path: Path, chaos: str) -> None:
    script, go = tmp_path / "training.py", tmp_path / "go"
    script.write_text(TRAINING)
    options = ["--workers", "2", "--chaos", chaos]
    with Terminal(*potluck_command(), "run", *options, str(script), str(go)) as terminal:
        paused = re.compile(r"80 of 320 samples \(25%\)  [\d.,]+/s  about .+ left")
        terminal.read_until(lambda drawn: paused.search(drawn) is not None)
        assert paused.search(terminal.drawn), terminal.drawn
        go.touch()
        assert terminal.finish() == 0, terminal.drawn
        seen = counts(terminal.drawn)
        if chaos != "kill all at step 20":  # then nothing is left, and it begins anew
            assert seen == sorted(seen)
        assert re.search(r"committed samples +320 of 320", terminal.drawn)


@pytest.mark.real_exec
def test_a_script_that_reports_no_samples_shows_none(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import potluck\nctx = potluck.init()\nctx.report(step=7)\nctx.close()\n")
    with Terminal(*potluck_command(), "run", "--workers", "2", str(script)) as terminal:
        assert terminal.finish() == 0, terminal.drawn
        assert "script.py" in terminal.drawn
        assert " samples (" not in terminal.drawn


OUTLIVES = """
import pathlib, sys, time
import potluck
ctx = potluck.init()
here = pathlib.Path(sys.argv[1])
print("it is up", flush=True)
(here / f"up-{ctx.rank}").touch()
while not (here / "go").exists():
    time.sleep(0.01)
print("it goes on", flush=True)
ctx.barrier()
(here / f"done-{ctx.rank}").touch()
ctx.close()
"""


@pytest.mark.parametrize(
    ("before", "options", "outlives"),
    [
        ("exec nohup", "", True),
        ("trap '' HUP; exec", "", True),
        ("trap '' HUP; exec", "--plain", True),
        ("exec", "", False),
    ],
    ids=["nohup", "ignored", "ignored, lines", "heard"],
)
def test_a_run_outlives_its_terminal_if_it_was_started_to(
    tmp_path: Path, before: str, options: str, outlives: bool
) -> None:
    """As the closed lid of a laptop ends its ssh session. The kernel tells the session."""
    script = tmp_path / "outlives.py"
    script.write_text(OUTLIVES)
    words = [*potluck_command(), "run", "--workers", "2", str(script), str(tmp_path)]
    command = shlex.join(words).replace(" run ", f" run {options} ", 1)
    both = (tmp_path / "up-0", tmp_path / "up-1")
    with Terminal("bash", "-c", f"cd {shlex.quote(str(tmp_path))}; {before} {command}") as terminal:
        terminal.read_until(lambda drawn: all(each.exists() for each in both))
        terminal.hang_up()
        if outlives:
            (tmp_path / "go").touch()
            assert terminal.wait() == 0
        else:
            assert terminal.wait() == 128 + signal.SIGHUP
    assert (tmp_path / "done-0").exists() is (tmp_path / "done-1").exists() is outlives
    if "nohup" in before:
        kept = (tmp_path / "nohup.out").read_text()
        assert "[0] it goes on" in kept, "nohup keeps the output"


EVIL = r"""
import sys
clipboard, clear, title = "\x1b]52;c;cm0gLXJmIH4=\x07", "\x1b[2J\x1b[H", "\x9b1;1H\u202e"
print("colours \x1b[31mred\x1b[0m stay", clipboard, clear, title)
print("half\rpotluck: the job succeeded")
sys.stdout.flush()
import potluck
ctx = potluck.init()
ctx.report(step=1)
raise RuntimeError("bad " + clipboard + clear + title + "\npotluck: the job succeeded")
"""


def obeyed(drawn: str) -> list[str]:
    """Escape sequences in ``drawn`` that are neither colours nor those that draw the table."""
    own = r"\x1b\[(\d*[AK]|\?25[hl])"
    rest = re.sub(rf"\x1b\[[0-9;]*m|{own}", "", drawn)
    return re.findall(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e].{0,8}", rest)


@pytest.mark.parametrize("options", [[], ["--plain"]], ids=["table", "lines"])
def test_a_worker_that_writes_escape_sequences_only_colours_its_lines(
    tmp_path: Path, options: list[str]
) -> None:
    script = tmp_path / "evil.py"
    script.write_text(EVIL)
    with Terminal(*potluck_command(), "run", *options, str(script)) as terminal:
        assert terminal.finish() == 1, terminal.drawn
    assert obeyed(terminal.drawn) == []
    assert "\x1b[31mred\x1b[0m stay" in terminal.drawn.replace("\x1b[39m", "")
    assert r"\x1b]52;c;cm0gLXJmIH4=\x07" in terminal.drawn
    lines = terminal.drawn.replace("\r", "").split("\n")
    forged = [line for line in lines if line.startswith("potluck: the job succeeded")]
    assert forged == [], "each line of others is in its place"


WAITS = """
import pathlib, sys, time
import potluck
ctx = potluck.init()
print("it is up")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
ctx.close()
"""


def test_status_shows_the_names_of_others_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    script, go = tmp_path / "a\x1b]52;c;eA==\x07\x1b[2J\u202eb.py", tmp_path / "go"
    script.write_text(WAITS)
    with Terminal(*potluck_command(), "run", str(script), str(go)) as run:
        run.read_until(lambda drawn: "it is up" in drawn)
        with Terminal(*potluck_command(), "status") as status:
            assert status.finish() == 0
        with Terminal(*potluck_command(), "status", "--json") as json:
            assert json.finish() == 0
        go.touch()
        assert run.finish() == 0, run.drawn
    for drawn in (run.drawn, status.drawn, json.drawn):
        assert obeyed(drawn) == []
    assert r"\x1b]52;c;eA==" in status.drawn
    assert r"\u202e" in json.drawn


BAR = """
import sys, time
from pathlib import Path
import potluck
ctx = potluck.init()
for number in range(1, 201):
    sys.stderr.write(f"\\r{number:>3}/200 steps")
    sys.stderr.flush()
    while number == 100 and not Path(sys.argv[1]).exists():
        time.sleep(0.01)
sys.stderr.write("\\n")
print("done")
ctx.close()
"""


def test_a_progress_bar_is_one_line_below_the_table_for_each_worker(tmp_path: Path) -> None:
    script, go = tmp_path / "bar.py", tmp_path / "go"
    script.write_text(BAR)
    with Terminal(*potluck_command(), "run", "--workers", "2", str(script), str(go)) as terminal:
        terminal.read_until(lambda _: all(f"[{r}] 100/200 steps" in terminal.text for r in (0, 1)))
        go.touch()
        assert terminal.finish() == 0, terminal.drawn
    above = [line for line in lines_above_the_table(terminal.drawn) if "steps" in line]
    assert sorted(above) == ["[0] 200/200 steps", "[1] 200/200 steps"]


def lines_above_the_table(drawn: str) -> list[str]:
    """What is left on the terminal, scrolled out or not: a small part of what terminals can do."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", drawn):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece not in "\r" and not piece.startswith("\x1b"):
            lines[row] += piece
    return [line.rstrip() for line in lines]


def test_a_progress_bar_in_a_file_is_a_line_now_and_then(tmp_path: Path) -> None:
    script, go = tmp_path / "bar.py", tmp_path / "go"
    script.write_text(BAR)
    with run_command("--workers", "2", str(script), str(go)) as run:
        for rank in (0, 1):  # where it is can be read while it runs
            run.wait_for(lambda line, r=rank: re.fullmatch(rf"\[{r}\] +\d+/200 steps", line))
        go.touch()
        assert run.finish() == 0, run.text
        for rank in (0, 1):
            said = [line for line in run.lines if line.startswith(f"[{rank}]")]
            assert said[-2:] == [f"[{rank}] 200/200 steps", f"[{rank}] done"]
            assert len(said) < 10, "200 states are no 200 lines"


ASKS = """
name = input("your name? ")
print("hello", name)
secret = 42
breakpoint()
print("it ends")
"""


@pytest.mark.parametrize("options", [[], ["--plain"]], ids=["table", "lines"])
def test_input_and_the_debugger_work_for_a_single_worker(
    tmp_path: Path, options: list[str]
) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    with Terminal(*potluck_command(), "run", *options, str(script)) as terminal:
        terminal.read_until(lambda _: "[0] your name? " in terminal.text)
        terminal.type("Ada\n")
        terminal.read_until(lambda drawn: "(Pdb) " in drawn)
        terminal.type("p secret * 2\n")
        terminal.read_until(lambda drawn: drawn.count("(Pdb) ") == 2)
        terminal.type("c\n")
        assert terminal.finish() == 0, terminal.drawn
    left = lines_above_the_table(terminal.drawn)
    order = ["[0] your name? Ada", "[0] hello Ada", "[0] (Pdb) p secret * 2", "[0] 84"]
    assert [line for line in left if line in order] == order, left
    assert "[0] it ends" in left


def test_input_of_several_workers_says_what_to_do(tmp_path: Path) -> None:
    for text in (ASKS, "breakpoint()\n"):
        script = tmp_path / "asks.py"
        script.write_text(text)
        with Terminal(*potluck_command(), "run", "--workers", "2", str(script)) as terminal:
            assert terminal.finish() == 1
        said = " ".join(lines_above_the_table(terminal.drawn))
        assert "input() and breakpoint() need a terminal" in said
        assert "potluck run --workers 1 SCRIPT" in said
