"""Plans made by uv, of an index of the test's own: locks, kinds of machines, what can't be had."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uv

from potluck._core.cluster.environments import planning
from potluck._core.cluster.environments.kinds import own_kind
from potluck._core.cluster.environments.plan import Plan
from potluck._core.cluster.environments.sources import find_source
from potluck._core.cluster.environments.uv import run_uv
from potluck.errors import ConfigurationError
from support.package_index import BACKEND, Index, package_index, tiny_source, tiny_wheel

LINUX, ARM, MAC = "x86_64-manylinux_2_36", "aarch64-manylinux_2_36", "aarch64-apple-darwin-14.0"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    # What potluck needs is resolved together with what the script needs; here that is one package.
    monkeypatch.setattr(planning, "_own_requirements", lambda: ["own>=1"])
    with package_index(with_installed=False) as index:
        index.add(tiny_wheel("own"), tiny_wheel("foo"))
        yield index


class Planner:
    """Makes plans of the files in ``folder``."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self.notes: list[str] = []

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name.replace("__", ".")).write_text(text)

    def plan(self, *kinds: str, builds: bool = False) -> Plan:
        source = find_source(self.folder, self.folder / "train.py")
        assert source is not None
        making = planning.make_plan(
            replace(source, builds=builds),
            kinds or (own_kind(),),
            folder=self.folder / "plans",
            index=self.index.url,
            note=self.notes.append,
        )
        return asyncio.run(making)

    def lock(self, *words: str) -> None:
        command = [uv.find_uv_bin(), *words, "--default-index", self.index.url]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)


@pytest.fixture
def planner(tmp_path: Path, index: Index) -> Planner:
    planner = Planner(tmp_path, index)
    planner.write(train__py="import foo\n")
    return planner


def chosen(plan: Plan, kind: str = "") -> dict[str, str]:
    return {each.name: each.file for each in plan.part(kind or own_kind()).wheels}


def test_each_kind_of_machine_has_its_own_wheels(planner: Planner, index: Index) -> None:
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_14_0_arm64"):
        index.add(tiny_wheel("bar", tag=f"py3-none-{tag}"))
    planner.write(requirements__txt="bar\nfoo; sys_platform == 'darwin'\n")
    plan = planner.plan(LINUX, ARM, MAC)
    assert chosen(plan, LINUX) == {
        "bar": "bar-1.0-py3-none-manylinux_2_28_x86_64.whl",
        "own": "own-1.0-py3-none-any.whl",
    }
    assert chosen(plan, ARM)["bar"] == "bar-1.0-py3-none-manylinux_2_28_aarch64.whl"
    assert chosen(plan, MAC)["bar"] == "bar-1.0-py3-none-macosx_14_0_arm64.whl"
    assert "foo" in chosen(plan, MAC)
    wheel = next(each for each in plan.part(MAC).wheels if each.name == "foo")
    data = index.files[wheel.file]
    assert (wheel.sha256, wheel.size) == (hashlib.sha256(data).digest(), len(data))
    assert index.sent.total() == 0  # nothing but metadata was asked for


def test_a_kind_without_a_wheel_is_named_and_the_others_go_on(
    planner: Planner, index: Index
) -> None:
    index.add(tiny_wheel("bar", "1.2", tag="py3-none-manylinux_2_28_x86_64"))
    planner.write(requirements__txt="bar==1.2\n")
    plan = planner.plan(LINUX, ARM)
    assert "bar" in chosen(plan, LINUX)
    with pytest.raises(
        ConfigurationError,
        match=r"^bar 1\.2 has no wheel for linux aarch64 \(only manylinux_2_28_x86_64\)$",
    ):
        plan.part(ARM)
    with pytest.raises(ConfigurationError, match=r"^requirements.txt: bar 1\.2 has no wheel for"):
        planner.plan(ARM)


def test_a_plan_is_kept_until_a_file_changes(planner: Planner, index: Index) -> None:
    planner.write(requirements__txt="foo\n")
    first = planner.plan()
    index.add(tiny_wheel("foo", "2.0"))
    assert planner.plan() == first
    planner.write(requirements__txt="foo  # anew\n")
    assert chosen(planner.plan())["foo"] == "foo-2.0-py3-none-any.whl"


def test_a_lock_says_versions_and_hashes(planner: Planner, index: Index) -> None:
    planner.write(
        pyproject__toml="[project]\nname = 'x'\nversion = '0'\nrequires-python = '>=3.11'\n"
        "dependencies = ['foo']\n"
    )
    planner.lock("lock")
    index.add(tiny_wheel("foo", "2.0"))
    assert chosen(planner.plan()) == {
        "foo": "foo-1.0-py3-none-any.whl",
        "own": "own-1.0-py3-none-any.whl",
    }
    index.add(tiny_wheel("foo", content=b"another file under the same name"))
    with pytest.raises(ConfigurationError, match=r"foo 1\.0: its index has another file than"):
        planner.plan(LINUX, MAC)


def test_a_lock_that_does_not_fit_its_project_is_refused(planner: Planner) -> None:
    planner.write(
        pyproject__toml="[project]\nname = 'x'\nversion = '0'\nrequires-python = '>=3.11'\n"
        "dependencies = ['foo']\n"
    )
    planner.lock("lock")
    project = planner.folder / "pyproject.toml"
    project.write_text(project.read_text().replace("'foo'", "'foo', 'own'"))
    with pytest.raises(ConfigurationError, match=r"lockfile .* needs to be updated"):
        planner.plan()


def test_a_lock_that_changes_while_it_is_read_is_named_and_no_plan_kept(
    planner: Planner, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other packages would be taken for those of the lock as it was, from then on."""
    index.add(tiny_wheel("foo", "2.0"))
    planner.write(requirements__txt="foo==1.0\n")

    async def change(words: Sequence[str], **how: Any) -> tuple[str, str]:
        planner.write(requirements__txt="foo==2.0\n")
        return await run_uv(words, **how)

    with monkeypatch.context() as patched:
        patched.setattr(planning, "run_uv", change)
        with pytest.raises(ConfigurationError, match=r"^requirements.txt was changed while"):
            planner.plan()
    planner.write(requirements__txt="foo==1.0\n")
    assert chosen(planner.plan())["foo"] == "foo-1.0-py3-none-any.whl"


def test_a_script_has_its_block_or_its_lock(planner: Planner, index: Index) -> None:
    planner.write(
        train__py="# /// script\n# requires-python = '>=3.11'\n# dependencies = ['foo']\n# ///\n"
    )
    assert "foo" in chosen(planner.plan())
    planner.lock("lock", "--script", "train.py")
    index.add(tiny_wheel("foo", "2.0"))
    assert chosen(planner.plan())["foo"] == "foo-1.0-py3-none-any.whl"


def test_a_pylock_and_hashes_of_requirements_count(planner: Planner, index: Index) -> None:
    digest = hashlib.sha256(index.files["foo-1.0-py3-none-any.whl"]).hexdigest()
    planner.write(requirements__txt=f"foo==1.0 \\\n    --hash=sha256:{digest}\n")
    assert "foo" in chosen(planner.plan())
    planner.write(requirements__txt=f"foo==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ConfigurationError, match=r"foo 1\.0: its index has another file than"):
        planner.plan()
    wheel = f"{{ url = 'https://example.org/x.whl', hashes = {{ sha256 = '{digest}' }} }}"
    planner.write(
        pylock__toml="lock-version = '1.0'\n[[packages]]\nname = 'foo'\nversion = '1.0'\n"
        f"wheels = [{wheel}]\n"
    )
    assert "foo" in chosen(planner.plan())
    planner.write(
        pylock__toml="lock-version = '1.0'\n[[packages]]\nname = 'foo'\n"
        "vcs = { type = 'git', url = 'https://example.org/foo' }\n"
    )
    with pytest.raises(ConfigurationError, match=r"foo .* has no wheel, and only wheels travel"):
        planner.plan()


def test_potluck_is_not_asked_for_at_the_index(planner: Planner) -> None:
    planner.write(requirements__txt="foo\npotluck>=0.1\n")
    assert set(chosen(planner.plan())) == {"foo", "own"}


def test_a_yanked_package_is_named(planner: Planner, index: Index) -> None:
    index.yanked["foo-1.0-py3-none-any.whl"] = "it eats data"
    planner.write(requirements__txt="foo==1.0\n")
    planner.plan()
    assert any("foo==1.0" in each and "it eats data" in each for each in planner.notes)
    planner.write(requirements__txt="foo\n")
    with pytest.raises(ConfigurationError, match="foo"):
        planner.plan()


def test_what_uv_can_not_resolve_is_said_in_its_words(planner: Planner, index: Index) -> None:
    index.add(tiny_wheel("bar", requires=("own<1",)))
    planner.write(requirements__txt="bar\n")
    with pytest.raises(ConfigurationError, match=r"^requirements.txt: No solution found .*own"):
        planner.plan()
    planner.write(requirements__txt="nothing-like-it\n")
    with pytest.raises(ConfigurationError, match="nothing-like-it was not found"):
        planner.plan()


def test_variables_of_the_user_lead_uv_to_no_other_place(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON", "2.7")
    monkeypatch.setenv("UV_NO_BINARY", "1")
    monkeypatch.setenv("VIRTUAL_ENV", "/nowhere")
    planner.write(requirements__txt="foo\n")
    assert "foo" in chosen(planner.plan())


def test_a_package_without_a_wheel_is_planned_as_its_source_where_that_is_allowed(
    planner: Planner, index: Index
) -> None:
    index.add(tiny_source("sourced"), tiny_wheel("tinybackend", module=BACKEND))
    planner.write(requirements__txt="foo\nsourced\n")
    with pytest.raises(ConfigurationError, match=r"sourced 1\.0 has no wheel .*; --allow-builds"):
        planner.plan()
    plan = planner.plan(builds=True)
    assert chosen(plan)["sourced"] == "sourced-1.0.tar.gz"
    part = plan.part(own_kind())
    assert [each.file for each in part.tools] == ["tinybackend-1.0-py3-none-any.whl"]
    planner.write(
        pyproject__toml="[project]\nname = 'x'\nversion = '0'\nrequires-python = '>=3.11'\n"
        "dependencies = ['sourced']\n"
    )
    planner.lock("lock")
    assert chosen(planner.plan(builds=True))["sourced"] == "sourced-1.0.tar.gz"
    with pytest.raises(ConfigurationError, match=r"sourced 1\.0 in the lock .*--allow-builds"):
        planner.plan()
