"""A missing package is one sentence with the pip command; a broken one keeps its own error."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck._core.optional import require
from potluck.errors import MissingDependency


def test_an_installed_module_is_returned() -> None:
    assert require("json", "torch").loads("[1]") == [1]


def test_a_missing_package_names_the_pip_command_in_one_sentence() -> None:
    with pytest.raises(MissingDependency) as caught:
        require("surely_not_installed.deeper", "torch")
    assert str(caught.value) == (
        "this needs the Python package 'surely_not_installed', which is not installed: "
        "pip install 'potluck[torch]'"
    )
    assert caught.value.__suppress_context__, "the user sees one error, not two"


def test_a_missing_dependency_is_an_import_error_too() -> None:
    with pytest.raises(ImportError):
        require("surely_not_installed", "torch")


def test_an_installed_package_that_lacks_its_own_needs_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed_package.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_it_needs") as caught:
        require("half_installed_package", "torch")
    assert not isinstance(caught.value, MissingDependency)
