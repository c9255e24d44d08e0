"""The cell magic ``%%potluck`` of notebooks: a cell as the script of a ``potluck run``.

The command is a process of its own, with the same options: a kernel has an event loop of its own on
the thread that would start workers. Its output appears as it comes. Named values come back through
a file among the job's results, in the format of checkpoints, without pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from potluck._core.cluster.code_store.folders import check_folder
from potluck._core.cluster.home.node_state import find_agent
from potluck._core.settings import load_settings
from potluck.checkpoint.state import decode, encode
from potluck.errors import ConfigurationError

RETURNED = "returned.safetensors"
"""The file of returned values, below the directory ``POTLUCK_OUTPUT`` of rank 0."""
_POTLUCK = (sys.executable, "-P", "-m", "potluck.cli.main")
_CELL = (sys.executable, "-P", "-c", "from potluck.cli.notebook import run_cell; run_cell()")
_FETCH_S = 600.0
_OWN = ("--json", "--plain", "--dry-run", "--detach")
"""Options of ``potluck run`` that the magic sets itself, or that leave it nothing to wait for."""


class CellError(ConfigurationError):
    """A cell can't run as a job, its job failed, or left no values. Raised in the cell, so that
    *Run all* stops there."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback through potluck's own code."""
        return [f"potluck: {self}"]


class CellMagic:
    """``%%potluck`` of one ``shell`` (an IPython ``InteractiveShell``)."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def run(self, line: str, cell: str) -> None:
        """Run this cell as the script of a `potluck run`.

        %%potluck [OPTIONS OF potluck run] [--return NAMES] [-- ARGUMENTS OF THE CELL]

            %%potluck -n 2 --return loss,weights
            import potluck
            ctx = potluck.init()
            ...

        --return: names, with commas between, whose values on rank 0 become variables of the
        notebook: any nesting of dict, list and tuple over tensors, arrays, numbers, text and None.
        All that the cell needs, it imports and computes itself: it does not see the notebook's
        variables. It may import modules that lie beside the notebook; where machines take part, the
        notebook's folder travels to them, as with a script that lies there.
        The stop button is Ctrl-C for the workers, and a second time kills them.
        """
        options, names, arguments = parsed(line)
        code = f"{cell.rstrip()}\n{_epilogue(names)}"
        with (
            _folder() as folder,
            _script(folder, code) as script,
            tempfile.TemporaryDirectory(prefix="potluck-") as scratch,
        ):
            summary = Path(scratch) / "summary.json"
            how = [*_CELL, str(script), "run", "--plain", "--json", str(summary), *options]
            exit_code = _run([*how, script.name, *arguments], folder)
            if exit_code:
                raise CellError(f"the cell's job ended with exit code {exit_code}")
            if names:
                job = json.loads(summary.read_text())["job"]
                self._shell.push(_fetched(job, names, Path(scratch)))


def parsed(line: str) -> tuple[list[str], tuple[str, ...], list[str]]:
    """The options for ``potluck run``, the names to return, and the arguments of the cell, in
    ``line``; CellError if it can't be understood."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CellError(f"%%potluck {line}: {error}") from None
    cut = words.index("--") if "--" in words else len(words)
    waiting, options, names = words[:cut], list[str](), list[str]()
    while waiting:
        word = waiting.pop(0)
        option, equals, value = word.partition("=")
        if option == "--return":
            if not equals and not waiting:
                raise CellError("%%potluck --return: names of variables are missing")
            value = value if equals else waiting.pop(0)
            names += [each.strip() for each in value.split(",")]
        elif option in _OWN:
            raise CellError(f"%%potluck {option}: a cell has no use for it; leave it out")
        else:
            options.append(word)
    for name in names:
        if not name.isidentifier():
            raise CellError(f"%%potluck --return {name}: this is no name of a variable")
    return options, tuple(dict.fromkeys(names)), words[cut + 1 :]


def _epilogue(names: Sequence[str]) -> str:
    """Lines behind the cell, so that its own keep their numbers in tracebacks."""
    if not names:
        return ""
    return (
        "from potluck.cli.notebook import return_values as _potluck_return\n"
        f"_potluck_return(globals(), {tuple(names)!r})\n"
    )


def return_values(variables: dict[str, Any], names: Sequence[str]) -> None:
    """In a worker, at the end of a cell: write the ``names`` of its ``variables``, if it is rank 0
    of its context (without one: of the world that it was started in).

    NameError for a variable that is not there, TypeError for a value that can't travel."""
    from potluck._core.context import DistributedContext

    contexts = (each for each in variables.values() if isinstance(each, DistributedContext))
    if next((each.rank for each in contexts), int(os.environ["RANK"])) != 0:
        return
    if missing := [name for name in names if name not in variables]:
        raise NameError(f"%%potluck --return: the cell has no variable {', '.join(missing)}")
    data = encode({name: variables[name] for name in names})
    (Path(os.environ["POTLUCK_OUTPUT"]) / RETURNED).write_bytes(data)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The folder of the cell's script: the notebook's, where modules beside it can be imported. If
    that may not travel (the user's home folder, say) and the cell runs on a cluster, an empty one.
    """
    settings = load_settings()
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise CellError("the notebook's folder has been removed; os.chdir to another one") from None
    try:
        check_folder(here, settings.home)
        is_own = False
    except ConfigurationError:
        is_own = find_agent(settings.home) is not None
    if not is_own:
        yield here
        return
    print(f"potluck: only this cell travels, not {here}, which holds far more than a script")
    with tempfile.TemporaryDirectory(prefix="potluck-cell-") as empty:
        yield Path(empty)


@contextlib.contextmanager
def _script(folder: Path, code: str) -> Iterator[Path]:
    """A new file with ``code`` in ``folder``, for as long as the job runs."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="cell_", suffix=".py", dir=folder, text=True)
    except OSError as error:
        raise CellError(
            f"the cell can't be written as a script into {folder}: {error.strerror}"
        ) from error
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(code)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def run_cell() -> None:
    """In the process of the command, whose first argument is the cell's ``_script``: the command,
    and at its end the script is removed. So it is, too, if the kernel was killed meanwhile."""
    from potluck.cli.main import app

    script = Path(sys.argv.pop(1))
    try:
        app(prog_name="potluck")
    finally:
        script.unlink(missing_ok=True)


def _run(command: Sequence[str], folder: Path) -> int:
    """Run ``command`` in ``folder``, and print its output as it comes; its exit code.

    The stop button sends SIGINT to the kernel, and to its process group, of which the command is
    no part: so it is passed on once, and the command ends its workers. Then KeyboardInterrupt, so
    that cells that wait behind this one don't run.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    interrupted: KeyboardInterrupt | None = None
    with process:
        while True:
            try:
                for text in process.stdout:
                    print(text, end="", flush=True)
                exit_code = process.wait()
                break
            except KeyboardInterrupt as error:
                interrupted = error
                process.send_signal(signal.SIGINT)
    if interrupted is not None:
        raise interrupted
    return exit_code


def _fetched(job: str, names: Sequence[str], scratch: Path) -> dict[str, Any]:
    """The values that rank 0 of ``job`` returned. CellError if it returned none."""
    command = [*_POTLUCK, "fetch", job, RETURNED, "--to", str(scratch / "fetched")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
    path = scratch / "fetched" / RETURNED
    if not path.is_file():
        raise CellError(
            f"the values of {', '.join(names)} did not come: the machine of rank 0 has gone, or "
            f"the cell ended before its last line. {done.stderr.strip()}"
        )
    return dict(decode(path.read_bytes()))
