"""The extension's stub has the functions, classes, methods and numbers of arguments that are built.

The types are written by hand: where a buffer, a callback or an event is meant, nanobind's own stub
says ``object``, and the arguments of most methods have no names there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import potluck
from potluck._core import native

STUB = Path(potluck.__file__).parent / "_core" / "_native.pyi"


def names(tree: ast.Module | ast.ClassDef, prefix: str = "") -> set[str]:
    """``f/2`` of two arguments, ``Class``, ``Class.f/3``, ``Class.field``."""
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(decorator_list=[ast.Name(id="property")]):
                found.add(prefix + node.name)
            case ast.FunctionDef():
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                found.add(f"{prefix}{node.name}/{len(every)}")
            case ast.ClassDef():
                found.add(prefix + node.name)
                found |= names(node, f"{prefix}{node.name}.")
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(prefix + name)
            case _:
                continue
    return found


@pytest.mark.skipif(not native.available, reason="there is no native core")
def test_the_stub_has_the_names_of_the_extension(tmp_path: Path) -> None:
    pytest.importorskip("nanobind")
    command = (sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "potluck._core._native")
    subprocess.run([*command, "-O", str(tmp_path)], check=True, timeout=200)
    built = names(ast.parse((tmp_path / "_native.pyi").read_text()))
    written = names(ast.parse(STUB.read_text()))
    missing, extra = sorted(built - written), sorted(written - built)
    assert not missing, f"{STUB} lacks {missing}"
    assert not extra, f"{STUB} has {extra}, the extension does not"
