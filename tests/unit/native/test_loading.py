"""The extension is found, switched off or refused, each with a sentence that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import potluck
from potluck._core import native

needs_core = pytest.mark.skipif(not native.available, reason=f"no native core: {native.reason}")


def test_zero_switches_it_off() -> None:
    assert native.load("0") == (None, "switched off by POTLUCK_NATIVE=0")


@needs_core
def test_the_extension_is_of_the_same_version_as_the_package() -> None:
    loaded = native.load("")
    assert loaded.module is native.core
    assert loaded.reason == ""
    assert native.core.version == potluck.__version__
    assert native.describe().startswith(f"native {potluck.__version__} (")


@needs_core
def test_an_extension_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "VERSION", "9.9")
    with pytest.raises(ImportError, match=r"the Python files of potluck 9\.9 in .*make native"):
        native.load("")


@needs_core
def test_an_extension_built_beside_another_stub_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "interface", lambda: "0" * 64)
    with pytest.raises(ImportError, match=r"_native.*was built from other sources.*make native"):
        native.load("")


def test_an_older_build_ends_the_import_and_names_the_command_that_rebuilds() -> None:
    script = (
        "import sys, types\n"
        "import potluck._core.version\n"
        "older = types.ModuleType('potluck._core._native')\n"
        "older.__file__ = '/where/_native.so'\n"
        "older.version = potluck._core.version.VERSION\n"
        "sys.modules['potluck._core._native'] = older\n"
        "import potluck._core.native"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 1
    said = run.stderr.splitlines()[-1]
    assert said.startswith("ImportError: /where/_native.so was built from other sources than ")
    assert "install potluck again (in a checkout: make native), or set POTLUCK_NATIVE=0" in said


def test_a_broken_extension_is_a_sentence_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "potluck._core._native", raising=False)
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"no shared object")
    loaded = native.load(str(broken))
    assert loaded.module is None
    assert "is there but can't be loaded; install potluck again" in loaded.reason


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == 'potluck._core._native':
            raise ModuleNotFoundError('no', name=name)
sys.meta_path.insert(0, Missing())
"""


def without_extension(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MISSING + script, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )


def test_without_the_extension_the_reason_names_the_compiler() -> None:
    script = "from potluck._core import native\nprint(native.available, native.describe())"
    said = without_extension(script).stdout
    assert said.startswith("False Python (it was not built: no working C++20 compiler")


def test_commands_say_that_the_native_core_is_missing_and_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('it runs')\n")
    app = "from potluck.cli.main import app\napp()"
    run = without_extension(app, "run", str(script))
    assert "[0] it runs" in run.stdout
    for said in (run.stderr, without_extension(app, "doctor").stdout):
        assert "no working C++20 compiler was there. Install one" in said
        assert "apt-get install g++" in said
    assert native.advice() == "" or not native.available
