"""pyproject.toml, requirements.lock and the tools that install from it agree."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pyproject.toml").read_text()
PYPROJECT = tomllib.loads(TEXT)
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
BUILD = PYPROJECT["build-system"]["requires"]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lockfile = _tool("lockfile")
LOCKED: dict[str, list[str]] = lockfile.locked()
DECLARED: list[str] = sorted({*lockfile.needed(",".join(EXTRAS)), *BUILD})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def test_each_dependency_has_a_floor_that_the_lock_keeps() -> None:
    for requirement in DECLARED:
        check_floor(requirement)


def check_floor(requirement: str) -> None:
    found = re.fullmatch(r"[\w.-]+(?:\[\w+\])?>=([\d.]+)(?:; sys_platform [^;]+)?", requirement)
    assert found, f"{requirement}: declare a floor (>=), at most with the system, and nothing else"
    pins = LOCKED.get(lockfile.name_of(requirement), [])
    assert pins, f"{requirement} is not in requirements.lock: run tools/lock"
    for pin in pins:
        version = lockfile.without_hashes(pin).partition("==")[2].partition(" ")[0]
        assert _numbers(version) >= _numbers(found[1]), f"{pin:.60}: run tools/lock"


def test_each_floor_of_the_core_and_of_its_extras_has_a_reason() -> None:
    core = TEXT[TEXT.index("\ndependencies = [") : TEXT.index("\ndev = [")]
    lines = [line for line in core.splitlines() if ">=" in line]
    assert len(lines) > 20
    without = [line for line in lines if not re.search(r"# \w", line)]
    tools_of_the_docs = {lockfile.name_of(each) for each in EXTRAS["docs"]}
    assert [
        line
        for line in without
        if lockfile.name_of(line.strip().strip('"')) not in tools_of_the_docs
    ] == []


def test_what_is_built_with_is_what_is_developed_with() -> None:
    assert set(BUILD) <= set(EXTRAS["dev"])


def test_each_pin_has_hashes() -> None:
    pins = [pin for pins in LOCKED.values() for pin in pins]
    assert len(pins) >= len(LOCKED) > 100
    assert [p[:80] for p in pins if not re.match(r"[\w.-]+==[\w.+]+( ;|$| --hash)", p)] == []
    assert [p[:80] for p in pins if not re.search(r" --hash=sha256:[0-9a-f]{64}\b", p)] == []


def test_the_tools_that_install_are_locked_as_well() -> None:
    assert {"pip", "setuptools", "wheel", "cmake", "ninja"} - LOCKED.keys() == set()


def test_the_lock_is_the_only_list_of_versions() -> None:
    assert not (ROOT / "constraints.txt").exists()


def test_the_packages_that_users_install_are_those_whose_vulnerabilities_are_errors() -> None:
    own = _tool("audit").own_packages()
    assert {"numpy", "cryptography", "cffi", "pydantic-core", "ifaddr"} <= own
    assert not {"torch", "transformers", "ray", "pytest", "potluck"} & own


def _wheel(folder: Path, version: str) -> tuple[Path, str]:
    """A wheel of the package `giant`, and the SHA-256 of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"giant-{version}-py3-none-any.whl"
    about = f"giant-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: giant\nVersion: {version}\n"
        )
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("is_genuine", [True, False])
def test_pip_takes_the_build_in_its_own_folder_if_the_lock_has_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_genuine: bool
) -> None:
    index, folder = tmp_path / "index", tmp_path / "my wheels"
    large, large_hash = _wheel(index / "giant", "2.0")
    small, small_hash = _wheel(folder, "2.0+small")
    (index / "giant/index.html").write_text(f'<a href="{large.name}#sha256={large_hash}">x</a>')
    pin = f"giant==2.0 --hash=sha256:{large_hash} --hash=sha256:{small_hash}"
    if not is_genuine:
        with small.open("ab") as file:
            file.write(b"changed")
    # What a person's pip.conf says; no other configuration of this machine counts.
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    config = tmp_path / "pip.conf"
    config.write_text(
        f"[install]\nfind-links =\n    {folder.as_uri()}\n    https://nowhere.invalid/\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "config", "list"], check=True, capture_output=True, text=True)

    page = tmp_path / "page.html"
    find_links = _tool("find_links")
    folders = list(find_links.configured(listed.stdout))
    page.write_text(find_links.page(folders, {"giant": [pin]}))
    config.write_text(f"[install]\nfind-links = {folder.as_uri()}\n")
    (tmp_path / "lock.txt").write_text(pin)
    command = ["install", "--quiet", "--dry-run", "--ignore-installed", "giant"]
    command += ["-c", str(tmp_path / "lock.txt"), "--report", str(tmp_path / "report")]
    command += ["--index-url", index.as_uri(), "--find-links", str(page)]
    subprocess.run([*pip, *command], check=True, capture_output=True)
    [taken] = json.loads((tmp_path / "report").read_text())["install"]
    assert folders == [folder]
    assert taken["metadata"]["version"] == ("2.0+small" if is_genuine else "2.0")
