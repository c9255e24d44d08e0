"""Rules for the source that no linter knows: no pickle, no eval, no sleeping tests, short files."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from support.sources import PACKAGE, ROOT, SUPPORT, named, nodes, offences, parsed

SOURCES = [*PACKAGE, *SUPPORT]
TESTS = sorted(set((ROOT / "tests").rglob("*.py")) - set(SUPPORT))
MAX_LINES = 700
MIN_CODE_LINES = 40
SMALL = {
    "compressors/options.py": "what eight importers check of a compressor, below each of them",
    "_core/backends/local.py": "one file for each backend",
    "_core/backends/torchdist/gloo.py": "one file for each library of torch",
    "_core/engine/patience.py": "the data plane and workers' links to agents both read it",
    "_core/codecs/kernels.py": "the seam between the native kernels and their twins",
    "_core/collectives/doubling.py": "one file for each algorithm",
    "_core/engine/arrays/kernels.py": "the seam between the native kernels and their twins",
    "_core/optional.py": "imported by every package that needs an optional one",
    "_core/wire/versions.py": "mostly a list of names, which greetings and formats ask",
    "_core/portable_math.py": "imported by packages that do not know each other",
    "_core/version.py": "read before anything else is imported",
    "_core/wire/broker.py": "messages of agents and sandboxes, which do not know each other",
    "codecs.py": "a name at the top for users",
    "training/means.py": "collectives of numbers; the loops and the trainers both call it",
    "torch/plugins/accelerate.py": "one file for each library",
    "torch/plugins/transformers.py": "one file for each library",
    "jax.py": "a name at the top for users",
    "collectives.py": "a name at the top for users",
}
"""Files of ``src/potluck`` that are shorter, and why they are files of their own."""

FORBIDDEN_MODULES = {
    **dict.fromkeys(["pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib"], "pickle"),
    **dict.fromkeys(["shelve", "marshal", "multiprocessing"], "pickle or worse underneath"),
}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {
    "torch.load": "reads pickle; state goes through safetensors",
    "torch.save": "writes pickle; state goes through safetensors",
    "os.system": "a shell; use subprocess with a list",
    "os.popen": "a shell; use subprocess with a list",
}
# torch.distributed's *_object_* collectives pickle what they carry.
FORBIDDEN_ENDINGS = ("_object", "_object_list")

MAY_START_THREADS = {
    "src/potluck/_core/background.py": "each start says what follows if the thread breaks",
    "src/potluck/checkpoint/store.py": "raises at the next call what its thread raised",
}

MAY_SLEEP = {
    "tests/conftest.py": "the leak guard polls /proc, which tells nobody when it changes",
    "tests/process/scripts/elastic_regression.py": "a training that is to take long, and no core",
    "tests/process/scripts/rounds.py": "the same",
    "tests/components/scripts/managed.py": "the same",
    "tests/world/test_held_deadlines.py": "a time-out must pass; no event tells that",
}

MAY_RUN_TEXT = {
    "tests/support/zygote.py": "runs, as Python does, what a test has Python run",
}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            modules = []
        for module in modules:
            if module.split(".")[0] in FORBIDDEN_MODULES:
                yield f"line {node.lineno}: imports {module}"
            if module in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: imports {module}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in FORBIDDEN_BUILTINS or name in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: calls {name}"
        if name.startswith(("dist.", "torch.distributed.")) and name.endswith(FORBIDDEN_ENDINGS):
            yield f"line {node.lineno}: calls {name}, which pickles"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("allow_pickle", "shell") and value is not False:
                yield f"line {node.lineno}: passes {keyword.arg}"


def sleeps(tree: ast.AST) -> Iterator[str]:
    """Calls of time.sleep and asyncio.sleep, under whatever name; asyncio.sleep(0) only yields."""
    names = {"time.sleep", "asyncio.sleep"}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio"):
            names |= {a.asname or a.name for a in node.names if a.name == "sleep"}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in names:
            first = node.args[0] if node.args else None
            if not (isinstance(first, ast.Constant) and first.value == 0):
                yield f"line {node.lineno}: calls {dotted(node.func)}"


def threads(tree: ast.AST) -> Iterator[str]:
    """Threads that may end by an exception without anybody being told."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func).endswith("Thread"):
            yield f"line {node.lineno}: calls {dotted(node.func)}; see potluck._core.background"


def test_no_pickle_and_no_eval_anywhere_in_the_source() -> None:
    assert offences([path for path in SOURCES if named(path) not in MAY_RUN_TEXT], unsafe) == []


def test_no_thread_breaks_in_silence() -> None:
    package = [path for path in PACKAGE if "testing" not in path.parts]
    assert offences([p for p in package if named(p) not in MAY_START_THREADS], threads) == []


def test_no_test_sleeps_to_synchronise() -> None:
    may = [path for path in TESTS if named(path) not in MAY_SLEEP]
    # Whatever ``sleeps`` finds has the word; to parse all tests takes seconds.
    assert offences([path for path in may if "sleep" in path.read_text()], sleeps) == []


@pytest.mark.parametrize(
    ("rule", "names"),
    [(threads, MAY_START_THREADS), (sleeps, MAY_SLEEP), (unsafe, MAY_RUN_TEXT)],
)
def test_what_a_list_allows_is_still_done(
    rule: Callable[[ast.AST], Iterator[str]], names: Iterable[str]
) -> None:
    assert [name for name in names if not list(rule(parsed(ROOT / name)))] == [], "strike them off"


def test_a_file_is_one_idea_and_that_is_short() -> None:
    long = [path for path in SOURCES if len(path.read_text().splitlines()) > MAX_LINES]
    assert [named(path) for path in long] == []


def code_lines(path: Path) -> int:
    """The lines of a file that are neither blank nor comments nor docstrings."""
    found: set[int] = set()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in {*layout, tokenize.ENCODING, tokenize.ENDMARKER}:
                found.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(parsed(path)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            value = each.value if isinstance(each, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.difference_update(range(each.lineno, (each.end_lineno or 0) + 1))
    return len(found)


def test_a_file_is_what_is_changed_together() -> None:
    package = ROOT / "src" / "potluck"
    files = {
        str(path.relative_to(package)): path
        for path in PACKAGE
        if path.name not in ("__init__.py", "__main__.py")
    }
    small = {name for name, path in files.items() if code_lines(path) < MIN_CODE_LINES}
    assert sorted(small - SMALL.keys()) == [], (
        f"fewer than {MIN_CODE_LINES} lines of code: move it into the file that uses it, or of its "
        "neighbours; or write into SMALL why it stands alone"
    )
    assert sorted(SMALL.keys() - small) == [], "no longer small, or gone"


def test_each_module_says_what_it_is() -> None:
    def silent(tree: ast.Module) -> list[str]:
        # An empty file needs no words.
        return ["no docstring"] if tree.body and not ast.get_docstring(tree) else []

    assert offences(SOURCES, silent) == []


def test_a_module_names_files_that_exist() -> None:
    package = ROOT / "src" / "potluck"
    missing = [
        f"{named(path)}: {name}"
        for path in PACKAGE
        for name in re.findall(r"``([\w/]+(?:\.py|/))``", ast.get_docstring(parsed(path)) or "")
        if not any(
            (place / name).exists() for place in (path.parent, package, package / "_core", ROOT)
        )
    ]
    assert missing == []


def test_a_docstring_or_comment_is_no_line_of_code(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text('"""One.\n\nTwo."""\n\n# Three.\nx = """four\nfive"""\n\ndef f():\n    "six"\n')
    assert code_lines(file) == 3


def test_tests_do_not_import_each_other() -> None:
    assert [named(path) for path in TESTS if path.name == "__init__.py"] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from torch import load",
        "import torch; torch.load('x')",
        "eval('1')",
        "exec('1')",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import subprocess; subprocess.run('ls', shell=True)",
        "import torch.distributed as dist; dist.broadcast_object_list([1])",
    ],
)
def test_each_unsafe_line_is_found(line: str) -> None:
    assert list(unsafe(ast.parse(line)))


def test_harmless_lines_are_not_found() -> None:
    text = "import re, json; re.compile('x'); json.load(f); os.execv(a, b); np.load('x')"
    assert list(unsafe(ast.parse(text))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import time; time.sleep(1)",
        "from time import sleep; sleep(0.1)",
        "from time import sleep as nap; nap(0.1)",
        "import asyncio\nasync def f(): await asyncio.sleep(0.1)",
    ],
)
def test_each_way_to_sleep_is_found(line: str) -> None:
    assert list(sleeps(ast.parse(line)))


def test_giving_way_once_is_no_sleep() -> None:
    assert list(sleeps(ast.parse("async def f(): await asyncio.sleep(0)"))) == []


def hidden_imports(tree: ast.Module) -> Iterator[str]:
    """Names that a function binds and the module imports: where both are meant, Python takes the
    unbound local, which no linter sees across the cases of a ``match``."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for function in nodes(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            bound = None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound = node.id
            elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler):
                bound = node.name
            if bound in imported:
                yield f"{function.name} (line {node.lineno}) hides the imported {bound}"


def test_no_local_name_hides_an_import() -> None:
    assert offences(SOURCES, hidden_imports) == []


@pytest.mark.parametrize(
    "line",
    [
        "  workers = 3",
        "  for workers in (): pass",
        "  match f:\n    case [workers]: pass\n    case _: workers.stop()",
        "  try: pass\n  except ValueError as workers: pass",
    ],
)
def test_each_way_to_hide_an_import_is_found(line: str) -> None:
    assert list(hidden_imports(ast.parse(f"from wire import workers\ndef f():\n{line}")))


def test_tables_of_commands_show_escape_sequences_and_do_not_send_them() -> None:
    """``console_on`` escapes the names and reasons of others; a Console of rich does not."""
    commands = ROOT / "src" / "potluck" / "cli"
    own = {"terminal.py", "bench.py"}  # bench shows its own figures only
    made = [
        path.name
        for path in sorted(commands.glob("*.py"))
        if path.name not in own and "Console(" in path.read_text()
    ]
    assert made == []
