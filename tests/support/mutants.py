"""Seeded faults: each is put into the product, and the tests that cover it must fail.

    make mutants                          # all of tests/mutants/mutants.toml, in this checkout
    make mutants ARGS="--only ring"       # those with "ring" in their name
    python -m support.mutants --tree DIR --list FILE  # in another checkout, with its own .venv

A fault is a text of the product and what is put in its place, so a list serves all trees that have
these texts, wherever their files lie. The files of the checkout are changed one at a time, and put
back, also after Ctrl-C; so this begins only without changes of ``src`` and ``native``. A fault that
the tests named for it do not notice is tried with all of ``tests/unit``, ``tests/conformance`` and
``tests/world`` (``--named-only`` leaves that out). A test notices a fault if it fails twice with
it, the second time alone, and passes without it (tried at the end): a test that a busy machine
fails notices nothing. Ends with 1 if any fault survives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]

LIST = TOP / "tests/mutants/mutants.toml"

_PRODUCT = ("src/potluck", "native/core")

_SUFFIXES = (".py", ".cpp", ".hpp")

_FAILED = ("FAILED ", "ERROR ")

_LIMIT_S = 900.0
"""For the tests of one fault. A test that hangs notices it too; none waits longer by itself."""

_WIDER = ("tests/unit", "tests/conformance", "tests/world")

_WIDER_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old``, which the product holds once (in a file named ``file``, if that is given),
    becomes ``new``; ``tests`` are paths of which one or more are to fail then."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    file: str = ""

    def place(self, sources: Mapping[Path, str]) -> Path:
        """The file of ``sources`` with ``old``. LookupError unless there is exactly one."""
        found = [
            path
            for path, text in sources.items()
            if self.old in text and self.file in ("", path.name)
        ]
        if len(found) != 1 or sources[found[0]].count(self.old) != 1:
            where = ", ".join(map(str, found)) or "no file"
            raise LookupError(f"{self.name!r}: {self.old!r} must stand once, and is in {where}")
        return found[0]


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: the first test that failed, or what ended the run; "" if none did."""

    name: str
    killed_by: str
    seconds: float


def mutants(path: Path = LIST) -> list[Mutant]:
    listed = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def sources(tree: Path) -> dict[Path, str]:
    """The texts of the product, by file of ``tree``."""
    files = (path for root in _PRODUCT for path in sorted((tree / root).rglob("*")))
    return {path: path.read_text() for path in files if path.suffix in _SUFFIXES}


@contextlib.contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[bool]:
    """The checkout with the fault, built if it is native: whether it could be built."""
    path = mutant.place(sources(tree))
    before = path.read_bytes()
    is_native = path.suffix != ".py"
    try:
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        yield _built(tree) if is_native else True
    finally:
        path.write_bytes(before)
        if is_native and not _built(tree):
            raise RuntimeError(f"the native core of {tree} does not build any more")


def _built(tree: Path) -> bool:
    return subprocess.run([tree / "tools/native"], cwd=tree, capture_output=True).returncode == 0


def first_failure(
    tree: Path, tests: Iterable[str], limit_s: float, *, workers: int = 0, but: Iterable[str] = ()
) -> str:
    """The first of ``tests`` in ``tree`` that fails, ``but`` left out, or what else ended the run;
    "" if all pass."""
    there = [each for each in tests if (tree / each.partition("::")[0]).exists()]
    if not there:
        raise LookupError(f"{tree} has none of {', '.join(tests)}")
    parallel = ["-n", str(workers), "--dist", "loadfile"] if workers else []
    command = [tree / ".venv/bin/pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    process = subprocess.Popen(
        [*map(str, command), "--tb=no", *parallel, *(f"--deselect={test}" for test in but), *there],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        shown, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:.0f} s"
    finally:
        if sys.platform != "win32":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    if process.returncode == 0:
        return ""
    failed = [line for line in shown.splitlines() if line.startswith(_FAILED)]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {process.returncode}"


def test_of(failure: str) -> str:
    """The id of the test that failed, of a result of ``first_failure``; "" if it names none."""
    return failure.partition(" ")[2] if failure.startswith(_FAILED) and "::" in failure else ""


def noticed(tree: Path, tests: tuple[str, ...], limit_s: float, *, workers: int = 0) -> str:
    """The first failure that comes again when its test is run once more, alone; "" if none."""
    by_luck: list[str] = []
    while failure := first_failure(tree, tests, limit_s, workers=workers, but=by_luck):
        test = test_of(failure)
        if not test or first_failure(tree, [test], limit_s):
            return failure
        by_luck.append(test)
    return ""


def tried(mutant: Mutant, tree: Path, *, wider: bool) -> Verdict:
    began = time.monotonic()
    with applied(mutant, tree) as is_built:
        killed_by = "" if is_built else "the compiler"
        killed_by = killed_by or noticed(tree, mutant.tests, _LIMIT_S)
        if not killed_by and wider:
            killed_by = noticed(tree, _WIDER, _WIDER_LIMIT_S, workers=4)
    return Verdict(mutant.name, killed_by, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=TOP, help="the checkout (default: this one)")
    parser.add_argument("--list", type=Path, default=LIST, help="the faults (default: today's)")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the result")
    parser.add_argument("--named-only", action="store_true", help="not all tests for what survives")
    given = parser.parse_args()
    tree = given.tree.resolve()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno", *_PRODUCT],
        cwd=tree,
        capture_output=True,
        text=True,
    ).stdout
    if changed:
        print(f"commit or undo what is changed in {tree} first:\n{changed}", file=sys.stderr)
        return 2
    chosen = [each for each in mutants(given.list) if given.only in each.name]
    texts = sources(tree)
    for each in chosen:
        each.place(texts)
    verdicts = []
    for number, mutant in enumerate(chosen, 1):
        verdict = tried(mutant, tree, wider=not given.named_only)
        verdicts.append(verdict)
        what = verdict.killed_by or "SURVIVES"
        print(
            f"{number:3}/{len(chosen)} {mutant.name}: {what} ({verdict.seconds:.0f} s)", flush=True
        )
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(each) for each in verdicts], indent=1) + "\n")
    alive = [each.name for each in verdicts if not each.killed_by]
    print(f"{len(verdicts) - len(alive)} of {len(verdicts)} are noticed", flush=True)
    for name in alive:
        print(f"survives: {name}")
    noticing = tuple(dict.fromkeys(filter(None, (test_of(each.killed_by) for each in verdicts))))
    if noticing and (failure := noticed(tree, noticing, _WIDER_LIMIT_S)):
        print(f"fails without a fault, too: {failure}", file=sys.stderr)
        return 2
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
