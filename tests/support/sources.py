"""The source as the rules of ``tests/architecture`` see it: each file read and parsed once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = sorted((ROOT / "tests" / "support").rglob("*.py"))
PACKAGE = sorted((ROOT / "src").rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """``tree`` and all below it, as ``ast.walk`` finds them, kept for the next rule."""
    return tuple(ast.walk(tree))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def offences(paths: Iterable[Path], rule: Callable[[ast.Module], Iterable[str]]) -> list[str]:
    """What ``rule`` finds in each file, with the file's name before it."""
    return [f"{named(path)}: {found}" for path in paths for found in rule(parsed(path))]
