"""What stands at the top of the package is what scripts import, and takes from behind the door
(``_core/``) only the names that ``door.toml`` lists."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import potluck
from support.sources import PACKAGE as SOURCES
from support.sources import ROOT, parsed

PACKAGE = ROOT / "src" / "potluck"
CORE = "potluck._core"
LIST = Path(__file__).with_name("door.toml")
MAX_ENTRIES = 20
NOT_ATTRIBUTES = {"cli"}  # the commands


def tops() -> list[str]:
    """The package's own files and folders: not what was built, nor the caches that an earlier
    version's folders leave in a checkout."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    own = (path for path in files if path.suffix not in (".pyc", ".so", ".pyd"))
    return sorted({path.relative_to(PACKAGE).parts[0] for path in own})


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers only."""
    for child in ast.iter_child_nodes(tree):
        if not is_for_type_checkers(child):
            yield child
            yield from running(child)


def taken(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a file takes from behind the door: module without ``potluck._core``, and name."""
    for node in running(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if f"{alias.name}.".startswith(f"{CORE}."):
                    yield alias.name.removeprefix(CORE).removeprefix("."), "(the module)"
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{CORE}."):
            inside = (node.module or "").removeprefix(CORE).removeprefix(".")
            for alias in node.names:
                yield (inside, alias.name) if inside else (alias.name, "(the module)")


def by_guest() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in SOURCES:
        first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if first in ("_core", "__init__"):
            continue
        for module, name in taken(parsed(path)):
            found[first][module].add(name)
    return {
        guest: {module: sorted(names) for module, names in sorted(modules.items())}
        for guest, modules in sorted(found.items())
    }


def lines(listed: dict[str, dict[str, list[str]]]) -> set[str]:
    return {
        f"[{guest}] {module}: {name}"
        for guest, modules in listed.items()
        for module, names in modules.items()
        for name in names
    }


def test_guests_take_only_what_is_written_down() -> None:
    written, found = lines(tomllib.loads(LIST.read_text())), lines(by_guest())
    told = f"{LIST.relative_to(ROOT)}: a name of the core that a guest needs is written down there"
    assert sorted(found - written) == [], f"{told}; first look for a public one"
    assert sorted(written - found) == [], f"{told}, and struck off when none takes it"


def test_few_things_stand_at_the_top() -> None:
    assert len(tops()) <= MAX_ENTRIES, tops()


def test_each_package_at_the_top_is_an_attribute_without_an_import_of_its_own() -> None:
    packages = {name.removesuffix(".py") for name in tops()}
    packages -= {"__init__", "_core", "py.typed", *NOT_ATTRIBUTES}
    assert packages == set(potluck._MODULES)


def test_each_folder_has_its_floor() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [floors] = [each for each in contracts["contracts"] if each["id"] == "floors"]
    named = {name.strip() for floor in floors["layers"] for name in floor.split("|")}
    inside = [path for path in (PACKAGE / "_core").iterdir() if path.suffix in ("", ".py")]
    there = {f"potluck.{name.removesuffix('.py')}" for name in tops()}
    there |= {f"{CORE}.{path.name.removesuffix('.py')}" for path in inside}
    without_floor = {CORE, "potluck.testing", "potluck.py.typed", "potluck.__init__"}
    without_floor |= {f"{CORE}.__init__", f"{CORE}.__pycache__"}
    assert named == there - without_floor


def test_what_is_taken_is_found() -> None:
    text = (
        "from potluck._core.engine.work import Work, again\n"
        "from potluck._core import native\n"
        "import potluck._core.wire\n"
        "import potluck.errors\n"
        "if TYPE_CHECKING:\n    from potluck._core.engine.mesh import Mesh\n"
        "def f():\n    from potluck._core.settings import Settings\n"
    )
    assert sorted(taken(ast.parse(text))) == [
        ("engine.work", "Work"),
        ("engine.work", "again"),
        ("native", "(the module)"),
        ("settings", "Settings"),
        ("wire", "(the module)"),
    ]
