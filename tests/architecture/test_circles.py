"""No circle of imports, those for type checkers included; nothing imports the root package.

``lint-imports`` keeps the floors, and leaves out what is imported for type checkers only.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp

GRAPH = grimp.build_graph("potluck", exclude_type_checking_imports=False, cache_dir=None)
ROOT = "potluck"
IMPORTS = {
    module: GRAPH.find_modules_directly_imported_by(module) & GRAPH.modules
    for module in GRAPH.modules
}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_imports() -> None:
    imports = {module: set(IMPORTS[module]) - {ROOT} for module in IMPORTS if module != ROOT}
    assert circle(imports) == []


def test_nothing_imports_the_root_package() -> None:
    importers = {module for module in IMPORTS if ROOT in IMPORTS[module]}
    assert importers == set()
    running = grimp.build_graph(ROOT, exclude_type_checking_imports=True, cache_dir=None)
    assert running.find_modules_that_directly_import(ROOT) == set()


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"a"}})
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})
    assert not circle({"a": {"b"}, "b": {"c"}})
