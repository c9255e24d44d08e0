"""What a script needs, as its text says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from potluck._core.cluster.code_store.imports import (
    describe_missing,
    imported,
    lacking,
    module_file,
    needs_of,
    own_modules,
    wants_torch,
)
from potluck._core.wire.jobs import Need


def names(tmp_path: Path, text: str, **modules: str) -> set[str]:
    (tmp_path / "train.py").write_text(text)
    for name, content in modules.items():
        path = tmp_path / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return set(imported([tmp_path / "train.py"], [tmp_path]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os, json, potluck, numpy as np", {"numpy"}),
        ("from torch.nn import functional", {"torch"}),
        ("from potluck.torch import DDP", {"torch"}),
        ("import potluck.torch.loop", {"torch"}),
        ("from potluck import init", set()),
        ("def f():\n    with open('x'):\n        import tqdm", {"tqdm"}),
        ("try:\n    import tqdm\nexcept ImportError:\n    import rich", {"rich"}),
        ("try:\n    import tqdm\nexcept (AttributeError, ModuleNotFoundError):\n    pass", set()),
        ("try:\n    import tqdm\nexcept ValueError:\n    pass", {"tqdm"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tqdm", set()),
        ("import typing\nif typing.TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}),
        ("not Python", set()),
        ("\0", set()),
        ("x = " + "(" * 5000, set()),
    ],
)
def test_names_that_a_script_imports(tmp_path: Path, text: str, found: set[str]) -> None:
    assert names(tmp_path, text) == found


def test_modules_of_the_project_are_followed_at_any_depth(tmp_path: Path) -> None:
    found = names(
        tmp_path,
        "from models import net\nimport helpers",
        models__net="from . import layers",
        models__layers="from .deep.er import x\nimport numpy",
        models__deep__er="import torch",
        helpers="import helpers, train",
        not_imported="import pandas",
    )
    assert found == {"numpy", "torch"}


def test_a_module_imports_from_the_root_not_from_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "datasets.py").touch()  # pkg.datasets, not datasets
    (tmp_path / "common.py").write_text("import numpy")
    module = tmp_path / "pkg" / "train.py"
    module.write_text("import common, datasets")
    assert imported([module], [tmp_path]) == {"numpy", "datasets"}
    assert imported([module], [module.parent, tmp_path]) == {"numpy"}  # run as a file


def test_the_file_that_a_module_is(tmp_path: Path) -> None:
    for path in ("a/b/c.py", "a/d/__main__.py", "a/d.py", "e/__init__.py", "e/__main__.py", "e.py"):
        (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / path).touch()
    places = [tmp_path, tmp_path / "src"]
    for name, path in (("a.b.c", "a/b/c.py"), ("a.d", "a/d.py"), ("e", "e/__main__.py")):
        assert module_file(name, places) == (places[1] / path, places[1])
        script = f"import runpy, sys; sys.path.insert(0, {str(places[1])!r}); "
        script += f"print(runpy.run_module({name!r})['__file__'])"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.stdout.strip() == str(places[1] / path)  # Python's own choice
    assert module_file("a", places) is None
    assert module_file("a.b.c.d", places) is None


def test_packages_that_need_torch_count_as_torch() -> None:
    pytest.importorskip("torch")
    assert wants_torch(needs_of({"torch"}))
    assert not wants_torch(needs_of({"numpy", "sklearn"}))
    assert not wants_torch([Need("x", "no-such-distribution")])
    assert needs_of({"sklearn"}) == (Need("sklearn", "scikit-learn"),)
    assert needs_of({"no_such_module_here"}) == ()


def test_what_is_lacking_here() -> None:
    gone = Need("no_such_module_here", "no-such")
    assert lacking([Need("numpy", "numpy"), gone]) == (gone,)


def test_a_module_of_the_users_own_is_never_called_a_package(tmp_path: Path) -> None:
    """Seen: an invitation to a namesake on PyPI."""
    (tmp_path / "project" / "scripts").mkdir(parents=True)
    (tmp_path / "project" / "mypkg").mkdir()
    (tmp_path / "project" / "mypkg" / "net.py").touch()
    script = tmp_path / "project" / "scripts" / "train.py"
    script.write_text("import mypkg.net\nimport no_such_module_here")
    found = imported([script], [script.parent])
    own = own_modules(found, [script.parent])
    assert own == (("mypkg", str(tmp_path / "project")),)
    told = describe_missing("mypkg", (), own, "attic", "/venv/bin/python")
    assert "pip" not in told
    assert f"'mypkg', which lies in {tmp_path / 'project'}, beside the script's folder" in told
    told = describe_missing("cv2", (), own, "attic", "/venv/bin/python")
    assert told.endswith(
        "not installed on attic (/venv/bin/python); there: /venv/bin/python -m pip install "
        "opencv-python"
    )
    told = describe_missing("tqdm", (Need("tqdm", "tqdm"),), own, "", "/venv/bin/python")
    assert told.endswith("not installed for /venv/bin/python: /venv/bin/python -m pip install tqdm")
