"""``breakpoint()`` in a worker: it reads what is typed from a pipe, and the script goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from potluck._core.cluster.jobs import shim as shim_module
from potluck._core.wire.worker_link import EOT, TYPED

DEADLINE_S = 60.0


class Worker:
    """A script whose breakpoints read from a pipe."""

    def __init__(self, path: Path, script: str) -> None:
        path.write_text(script)
        theirs, self._typed = os.pipe()
        shim = [sys.executable, "-I", "-S", shim_module.__file__, "inside"]
        self.process = subprocess.Popen(
            [*shim, sys.executable, "-u", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            pass_fds=(theirs,),
            env=os.environ
            | {
                TYPED: f"{theirs}:{os.fstat(theirs).st_ino}",
                "PYTHONBREAKPOINT": "potluck._core.backends.debugger.stop",
                "POTLUCK_JOB": "train-1",
            },
        )
        os.close(theirs)
        self.said = ""

    def type(self, text: bytes) -> None:
        os.write(self._typed, text)

    def read_until(self, text: str) -> None:
        """Until it has written ``text``, since the last call."""
        assert self.process.stdout is not None
        before = len(self.said)
        while text not in self.said[before:]:
            line = self.process.stdout.readline()
            assert line, f"it ended without {text!r}: {self.said}"
            self.said += line

    def finish(self) -> int:
        """Its exit code."""
        self.said += self.process.communicate(timeout=DEADLINE_S)[0]
        return self.process.returncode

    def close(self) -> None:
        os.close(self._typed)
        self.process.kill()
        self.process.wait()


@contextmanager
def started(tmp_path: Path, script: str) -> Iterator[Worker]:
    worker = Worker(tmp_path / "train.py", script)
    try:
        yield worker
    finally:
        worker.close()


def test_a_prompt_reads_what_is_typed_and_the_script_goes_on(tmp_path: Path) -> None:
    with started(tmp_path, "secret = 21\nbreakpoint()\nprint('went on')\n") as worker:
        worker.read_until("at a breakpoint (train.py, line 2), and the other ranks wait")
        worker.read_until("(Pdb)\n")
        worker.type(b"p secret * 2\n")
        worker.read_until("42\n")
        worker.type(b"c\n")
        assert worker.finish() == 0
    assert worker.said.endswith("went on\n")
    assert "potluck attach train-1 --rank N" in worker.said


LOOP = """
from potluck._core.engine import patience
for number in range(4):
    breakpoint()
    print("turn", number, patience.prompts)
"""


def test_the_end_of_what_is_typed_clears_breakpoints_and_what_is_typed_early_is_dropped(
    tmp_path: Path,
) -> None:
    with started(tmp_path, LOOP) as worker:
        worker.read_until("(Pdb)\n")
        worker.type(b"b 5\n")
        worker.read_until("(Pdb)\n")
        worker.type(b"c\n")
        worker.read_until("turn 0 []\n")  # a breakpoint is set, and nobody waits for it
        worker.read_until("(Pdb)\n")
        worker.type(b"c\n")
        worker.read_until("turn 1 []\n")
        worker.read_until("(Pdb)\n")
        worker.type(EOT + b"q\nq\n")
        worker.read_until("turn 2 []\n")
        worker.read_until("(Pdb)\n")  # where what came before is dropped
        worker.type(EOT)
        assert worker.finish() == 0
    assert worker.said.endswith("turn 3 []\n")
    assert worker.said.count("at a breakpoint (train.py, line 4)") == 4


def test_quitting_ends_the_script_as_pdb_does(tmp_path: Path) -> None:
    with started(tmp_path, "breakpoint()\nprint('went on')\n") as worker:
        worker.read_until("(Pdb)\n")
        worker.type(b"q\n")
        assert worker.finish() == 1
    assert "bdb.BdbQuit" in worker.said
    assert "went on\n" not in worker.said


def test_an_interrupt_at_the_prompt_is_the_scripts(tmp_path: Path) -> None:
    script = "try:\n    breakpoint()\n    x = 1\nexcept KeyboardInterrupt:\n    print('saved')\n"
    with started(tmp_path, script) as worker:
        worker.read_until("(Pdb)\n")
        worker.process.send_signal(signal.SIGINT)
        assert worker.finish() == 0
    assert worker.said.endswith("saved\n")


def test_a_program_that_the_script_starts_passes_its_breakpoints_over(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'breakpoint(); print(2)'], check=True)\n"
    )
    with started(tmp_path, script) as worker:
        assert worker.finish() == 0
    assert worker.said.endswith("is passed over: no agent started this process\n2\n")


def test_an_end_is_heard_wherever_the_prompt_is(tmp_path: Path) -> None:
    """Behind text without a line end, in a list of commands, and in a debugger within."""
    with started(tmp_path, LOOP) as worker:
        typed = [b"p 12", b"b 5\ncommands 1\np 2\n", b"debug len([])\n"]
        for number, each in enumerate(typed):
            worker.read_until("(Pdb)\n")
            worker.type(each + EOT)
            worker.read_until(f"turn {number} []\n")
        worker.read_until("(Pdb)\n")
        worker.type(b"c\n")
        assert worker.finish() == 0
    assert "(Pdb)\n12\n" not in worker.said
    assert "(com)" in worker.said
    assert "ENTERING RECURSIVE DEBUGGER" in worker.said


FORKS = """
import os
def fork():
    if os.fork() == 0:
        breakpoint()
        print("the fork goes on")  # line 6
        os._exit(0)
    os.wait()
fork()
breakpoint()
fork()
print("done")
"""


def test_a_fork_passes_breakpoints_over(tmp_path: Path) -> None:
    """Nobody waits for it: a script's own, and those that were set at the prompt before."""
    with started(tmp_path, FORKS) as worker:
        worker.read_until("breakpoint() at train.py, line 5 is passed over")
        worker.read_until("the fork goes on\n")
        worker.read_until("(Pdb)\n")
        worker.type(b"b 6\n")
        worker.read_until("(Pdb)\n")
        worker.type(b"c\n")
        worker.read_until("the fork goes on\n")
        assert worker.finish() == 0
    assert worker.said.count("(Pdb)") == 2
    assert worker.said.endswith("done\n")


def test_a_pipe_with_a_high_number(tmp_path: Path) -> None:
    """``select`` takes none of 1,024 and above."""
    script = "import os, resource\n"
    script += "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    script += "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
    script += "fd, rest = os.environ['POTLUCK_TYPED'].split(':', 1)\n"
    script += "os.dup2(int(fd), 1500)\nos.environ['POTLUCK_TYPED'] = f'1500:{rest}'\n"
    with started(tmp_path, script + "breakpoint()\n") as worker:
        worker.read_until("(Pdb)\n")
        worker.type(b"c\n")
        assert worker.finish() == 0
