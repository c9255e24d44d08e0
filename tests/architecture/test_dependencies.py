"""pyproject.toml, requirements.lock and the tools that install from it agree."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
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


@pytest.mark.parametrize("requirement", DECLARED)
def test_each_dependency_has_a_floor_that_the_lock_keeps(requirement: str) -> None:
    found = re.fullmatch(r"[\w.-]+(?:\[\w+\])?>=([\d.]+)", requirement)
    assert found, f"{requirement}: declare a floor (>=) and nothing else"
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


@pytest.mark.parametrize("name", sorted(LOCKED))
def test_each_pin_has_hashes(name: str) -> None:
    for pin in LOCKED[name]:
        assert re.match(r"[\w.-]+==[\w.+]+( ;|$| --hash)", pin), pin[:80]
        assert re.search(r" --hash=sha256:[0-9a-f]{64}\b", pin), f"{pin:.80}: no hash"


@pytest.mark.parametrize("name", ["pip", "setuptools", "wheel", "cmake", "ninja"])
def test_the_tools_that_install_are_locked_as_well(name: str) -> None:
    assert name in LOCKED


def test_the_lock_is_the_only_list_of_versions() -> None:
    assert not (ROOT / "constraints.txt").exists()


def test_the_packages_that_users_install_are_those_whose_vulnerabilities_are_errors() -> None:
    own = _tool("audit").own_packages()
    assert {"numpy", "cryptography", "cffi", "pydantic-core", "ifaddr"} <= own
    assert not {"torch", "transformers", "ray", "pytest", "potluck"} & own
