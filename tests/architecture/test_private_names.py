"""A private attribute of a class is read and set only in the module that defines it, and through
``self`` in classes derived from it: two modules meet at public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from support.sources import PACKAGE, ROOT, named, nodes, parsed

MAY_READ = {
    "src/potluck/_core/backends/torchdist/gloo.py": {"options._timeout", "options._devices"},
    "src/potluck/_core/backends/torchdist/nccl.py": {"options._timeout"},
    "src/potluck/_core/context/start.py": {"context._owner"},  # keeps the contexts of the process
    "src/potluck/estimators/mlp.py": {"model._random_state"},  # scikit-learn's
    "src/potluck/torch/process_group/creation.py": {
        "dist.distributed_c10d._world",
        "parent._world",  # the creator of sub-groups, a function since torch asks for one
    },
}
"""Attributes of torch's and scikit-learn's objects that have the name of one of ours, and parts of
a class that can't be methods."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_object(node: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def defined(tree: ast.AST) -> Iterator[str]:
    """The private attributes and methods of the classes of a module. A Protocol defines none: it
    would only list those of another module."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if own_object(node.value) and is_private(node.attr):
                yield node.attr
        elif isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = member.name
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    name = member.target.id
                else:
                    continue
                if is_private(name):
                    yield name


def used_elsewhere(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The private attributes of other objects than ``self``, and the expressions."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not own_object(node.value):
            yield node.attr, ast.unparse(node)


def intrusions(modules: Mapping[str, ast.AST]) -> list[str]:
    homes = {name: set(defined(tree)) for name, tree in modules.items()}
    known = set().union(*homes.values())
    return [
        f"{name}: {expression}"
        for name, tree in modules.items()
        for attribute, expression in used_elsewhere(tree)
        if attribute in known - homes[name] and expression not in MAY_READ.get(name, ())
    ]


def test_no_module_touches_private_attributes_of_another_ones_classes() -> None:
    assert intrusions({named(path): parsed(path) for path in PACKAGE}) == []


def test_what_the_list_allows_is_still_done() -> None:
    for name, expressions in MAY_READ.items():
        found = {expression for _, expression in used_elsewhere(parsed(ROOT / name))}
        assert expressions <= found, f"{name}: strike off {expressions - found}"


@pytest.mark.parametrize("line", ["job._lost(error)", "job._attempts = 0", "x = self.job._pace"])
def test_each_way_to_touch_one_is_found(line: str) -> None:
    loop = (
        "class Loop:\n"
        "    _pace: int\n"
        "    def __init__(self): self._attempts = 1\n"
        "    def _lost(self, error): ...\n"
    )
    rounds = (
        f"class Job(Protocol):\n    _pace: int\nclass Rounds:\n    def run(self, job): {line}\n"
    )
    assert len(intrusions({"loop": ast.parse(loop), "rounds": ast.parse(rounds)})) == 1
    derived = "class Torch(Loop):\n    def run(self): self._lost(super()._pace)\n"
    assert intrusions({"loop": ast.parse(loop), "torch": ast.parse(derived)}) == []
