"""Environments made by uv of an index of the test's own: what is kept, refused and removed."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uv

from potluck._core.cluster.environments import making
from potluck._core.cluster.environments.kinds import own_kind
from potluck._core.cluster.environments.making import Environment, Environments
from potluck._core.cluster.environments.plan import Part, Plan, Wheel
from potluck._core.cluster.environments.uv import run
from potluck._core.cluster.jobs.process import build_prefix
from potluck._core.cluster.sharing.confinement import Confinement
from potluck._core.cluster.sharing.limits import Limits
from potluck._core.settings import Settings
from potluck.cli.clean import clean
from potluck.errors import ConfigurationError
from support.commands import comes_true
from support.package_index import BACKEND, Index, package_index, tiny_source, tiny_wheel
from support.requests import Nodes

FOO = "foo-1.0-py3-none-any.whl"
TOOL = "tinybackend-1.0-py3-none-any.whl"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    # The real ones take a second to compile.
    small = {"potluck/__init__.py": b"", "potluck-0.1.dist-info/METADATA": b"Name: potluck\n"}
    monkeypatch.setattr(making, "own_files", lambda: small)
    with package_index(with_installed=False) as index:
        index.add(tiny_wheel("foo", content=bytes(range(256)) * 4096), tiny_wheel("bar"))
        yield index


class Maker:
    """Makes environments below ``home``."""

    def __init__(
        self,
        home: Path,
        index: Index,
        *,
        nodes: Nodes | None = None,
        name: str = "a1",
        **settings: object,
    ) -> None:
        self.index = index
        given = {"home": home, "package_index": index.url} | settings
        self.settings = Settings(**given)  # type: ignore[arg-type]
        self.store = (nodes or Nodes()).store(self.settings.home / "content", name * 32)
        self.limits = Confinement(Limits())
        self.environments = Environments(
            self.settings,
            self.store,
            lambda node: node[:2],
            partial(build_prefix, self.settings.home, self.limits),
        )
        self.notes: list[str] = []

    def wheel(self, file: str) -> Wheel:
        name, version, *_ = file.removesuffix(".tar.gz").split("-")
        data = self.index.files[file]
        url = self.index.url.replace("/simple", f"/files/{file}")
        return Wheel(name, version, file, hashlib.sha256(data).digest(), len(data), url)

    def plan(self, *files: str) -> Plan:
        wheels = tuple(map(self.wheel, files or (FOO, "bar-1.0-py3-none-any.whl")))
        tools = (self.wheel(TOOL),) if any(wheel.is_source for wheel in wheels) else ()
        return Plan(python=_MINOR, source="uv.lock", parts=(Part(own_kind(), wheels, "", tools),))

    async def make(self, *files: str) -> Environment:
        return await self.environments.make(self.plan(*files), self.notes.append)

    def made(self, *files: str) -> Environment:
        return asyncio.run(self.make(*files))

    def folders(self) -> list[str]:
        return [each.name for each in self.environments.root.iterdir() if len(each.name) == 32]


_MINOR = f"3.{sys.version_info[1]}"


@pytest.fixture
def maker(tmp_path: Path, index: Index) -> Maker:
    return Maker(tmp_path / "home", index)


def said(environment: Environment, code: str) -> str:
    command = [str(environment.python), "-c", code]
    variables = environment.variables(dict(os.environ))
    return subprocess.check_output(command, env=variables, text=True).strip()


def test_an_environment_is_made_once_and_used_again(maker: Maker, index: Index) -> None:
    first = maker.made()
    code = "import foo, sys; print(foo.VERSION, sys.prefix)"
    assert said(first, code) == f"1.0 {first.path}"
    assert maker.notes[0].startswith("0 of 2 packages are here; fetching 2, 1.0")
    assert "MB from 127.0.0.1)" in maker.notes[-1]
    first.release()
    maker.notes.clear()
    plan = maker.plan()
    index.close()
    second = asyncio.run(maker.environments.make(plan, maker.notes.append))
    assert (second.path, maker.notes) == (first.path, [])
    assert index.asked == {FOO: 1, "bar-1.0-py3-none-any.whl": 1}
    second.release()


def test_no_file_is_shared_with_another_environment(maker: Maker) -> None:
    first, second = maker.made(FOO), maker.made()
    for environment in (first, second):
        files = [path for path in environment.path.rglob("*") if not path.is_symlink()]
        module = next(path for path in files if path.name == "data.bin" and "foo" in path.parts)
        assert module.stat().st_nlink == 1
        assert not any(path.stat().st_mode & 0o222 for path in files)
        assert list(environment.path.rglob("foo/__pycache__/*.pyc"))
        environment.release()


def test_an_environment_that_a_script_wrote_into_is_made_anew(maker: Maker) -> None:
    first = maker.made()
    module = next(first.path.rglob("foo/__init__.py"))
    module.chmod(0o644)
    module.write_text("VERSION = 'changed'")
    first.release()
    second = maker.made()
    assert said(second, "import foo; print(foo.VERSION)") == "1.0"
    second.release()


def test_variables_lead_uv_and_workers_to_no_other_environment(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "foo").mkdir(parents=True)
    (other / "foo" / "__init__.py").write_text("VERSION = 'of another place'")
    for name in ("UV_PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT"):
        monkeypatch.setenv(name, sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(other))
    monkeypatch.setenv("UV_SYSTEM_PYTHON", "1")
    before = sorted(path.name for path in Path(making.__file__).parents[5].glob("*"))
    environment = maker.made()
    assert said(environment, "import foo; print(foo.VERSION)") == "1.0"
    assert environment.path.is_relative_to(tmp_path)
    assert sorted(path.name for path in Path(making.__file__).parents[5].glob("*")) == before
    environment.release()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip", "sent other bytes"),
        ("404", "answers 404 Not Found for foo"),
    ],
)
def test_an_index_that_lies_is_named_and_leaves_nothing(
    maker: Maker, index: Index, fault: str, words: str
) -> None:
    index.faults[FOO] = fault
    with pytest.raises(ConfigurationError, match=rf"^lacks foo 1\.0: .*\(127\.0\.0\.1:\d+ {words}"):
        maker.made()
    assert maker.folders() == []
    assert maker.environments.wheels.missing(maker.plan().parts[0].wheels) == [maker.wheel(FOO)]
    index.faults.clear()
    environment = maker.made()
    assert index.asked["bar-1.0-py3-none-any.whl"] == 1
    environment.release()


def test_a_machine_without_an_index_says_what_it_lacks(
    tmp_path: Path, index: Index, maker: Maker
) -> None:
    plan = maker.plan()
    maker.made(FOO).release()
    index.close()
    with pytest.raises(
        ConfigurationError, match=r"^lacks bar 1\.0: .*\(127\.0\.0\.1:\d+ can't be ask"
    ):
        asyncio.run(maker.environments.make(plan, maker.notes.append))


def test_a_private_address_that_the_owner_did_not_name_is_not_asked(
    tmp_path: Path, index: Index, maker: Maker
) -> None:
    stranger = Maker(tmp_path / "stranger", index, package_index="https://pypi.org/simple")
    with pytest.raises(ConfigurationError, match=r"foo 1\.0 .* not a public address"):
        stranger.made()
    assert index.asked.total() == 0


def test_the_address_that_was_looked_at_is_the_one_that_is_asked(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that gives a public address first, and one of this network the next time."""
    answers, dialled = ["93.184.216.34", "127.0.0.1", "127.0.0.1"], list[str]()

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host == "index.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    def dial(address: tuple[str, int], *_: object) -> socket.socket:
        dialled.append(address[0])
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", dial)
    wheels = Maker(tmp_path / "home", index).environments.wheels
    wheel = Wheel("foo", "1.0", FOO, bytes(32), 1, f"http://index.example/{FOO}")
    with pytest.raises(OSError, match="nobody is there"):
        wheels._open(wheel, 0, 1)
    with pytest.raises(ConfigurationError, match=r"index\.example: 127\.0\.0\.1 is not a public"):
        wheels._open(wheel, 0, 1)
    assert dialled == ["93.184.216.34"]


def test_an_owner_may_want_no_environments(tmp_path: Path, index: Index) -> None:
    with pytest.raises(ConfigurationError, match=r"makes no environments .* wheels lets it"):
        Maker(tmp_path / "home", index, environments="off").made()
    assert index.asked.total() == 0


def test_what_can_not_fit_is_refused_before_it_is_fetched(tmp_path: Path, index: Index) -> None:
    with pytest.raises(ConfigurationError, match=r"has no room .* at most"):
        Maker(tmp_path / "home", index, environments_gb=0.001).made()
    assert index.asked.total() == 0


def test_what_was_used_last_stays_and_what_is_used_now(tmp_path: Path, index: Index) -> None:
    names = [f"big{number}-1.0-py3-none-any.whl" for number in range(3)]
    for name in names:  # of 1 MB, and as much unpacked
        index.add(tiny_wheel(name.split("-")[0], content=os.urandom(1 << 20)))
    maker = Maker(tmp_path / "home", index, environments_gb=4 / 1024)
    used = maker.made(names[0])
    second = maker.made(names[1])
    second.release()
    third = maker.made(names[2])
    assert used.path.exists()
    assert third.path.exists()
    assert not second.path.exists()
    total = sum(each.num_bytes for each in maker.environments.kept())
    assert total <= 4 << 20
    used.release()
    third.release()


def test_interrupted_it_leaves_nothing_half_made(maker: Maker, index: Index) -> None:
    index.faults[FOO] = "stall"

    async def interrupted() -> None:
        making = asyncio.create_task(maker.make())
        assert await asyncio.to_thread(comes_true, lambda: bool(index.sent[FOO]), 30)
        making.cancel()
        index.released.set()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(interrupted())
    assert maker.folders() == []


KILLED = """
import asyncio, os, sys
from pathlib import Path
from typing import Any
sys.path.insert(0, {tests!r})
from potluck._core.cluster.environments import making
from potluck._core.settings import Settings
from potluck._core.cluster.environments.plan import decode_plan
from support.requests import Nodes
made = making._Build._install
async def install(self, own):
    await made(self, own)
    print("installed", flush=True)
    await asyncio.sleep(600)
making._Build._install = install
settings = Settings(home=Path({home!r}), package_index={index!r})
store = Nodes().store(settings.home / "content", "b2" * 32)
environments = making.Environments(settings, store)
asyncio.run(environments.make(decode_plan(Path({plan!r}).read_bytes()), print))
"""


def test_a_killed_builder_leaves_nothing_that_counts(
    maker: Maker, index: Index, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(maker.plan().encode())
    text = KILLED.format(
        tests=str(Path(__file__).parents[3]),
        home=str(tmp_path / "home"),
        index=index.url,
        plan=str(plan),
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert any(b"installed" in line for line in builder.stdout)
        (folder,) = maker.folders()
        maker.environments.remove_incomplete()
        assert maker.folders() == [folder]  # it is being made
        assert [each.is_wheel for each in maker.environments.kept()] == [True, True]
        builder.send_signal(signal.SIGKILL)
    assert comes_true(lambda: _is_removed(maker), 10)
    environment = maker.made()
    assert said(environment, "import foo; print(foo.VERSION)") == "1.0"
    environment.release()


def _is_removed(maker: Maker) -> bool:
    maker.environments.remove_incomplete()
    return maker.folders() == []


def test_two_who_want_the_same_make_it_once(maker: Maker, index: Index) -> None:
    async def both() -> Sequence[Environment]:
        return await asyncio.gather(maker.make(), maker.make())

    one, other = asyncio.run(both())
    assert one.path == other.path
    assert sum("ready after" in note for note in maker.notes) == 1
    assert index.asked[FOO] == 1
    one.release()
    (kept,) = (each for each in maker.environments.kept() if not each.is_wheel)
    assert not maker.environments.remove(kept)
    other.release()


def test_a_wheel_leaves_the_index_once_for_all_machines(index: Index, tmp_path: Path) -> None:
    index.add(tiny_wheel("large", content=os.urandom(40 << 20)))
    large = "large-1.0-py3-none-any.whl"
    nodes = Nodes()
    makers = [Maker(tmp_path / name, index, nodes=nodes, name=name) for name in ("a1", "b2")]

    async def all_of_them() -> None:
        for made in await asyncio.gather(*(maker.make(FOO, large) for maker in makers)):
            made.release()

    asyncio.run(all_of_them())
    assert index.sent[large] <= 1.1 * len(index.files[large])
    plan = makers[0].plan(FOO, large)
    index.close()
    late = Maker(tmp_path / "late", index, nodes=nodes, name="c3")
    asyncio.run(late.environments.make(plan, late.notes.append)).release()
    assert "MB from a1" in late.notes[-1]
    assert "127.0.0.1" not in late.notes[-1]


def test_a_machine_that_gives_another_wheel_is_named_and_the_index_asked(
    index: Index, tmp_path: Path
) -> None:
    nodes = Nodes()
    liar = Maker(tmp_path / "liar", index, nodes=nodes, name="e5")
    liar.made(FOO).release()
    wheel = liar.environments.wheels.path(liar.wheel(FOO))
    wheel.chmod(0o600)
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    maker = Maker(tmp_path / "ada", index, nodes=nodes)
    environment = maker.made(FOO)
    assert said(environment, "import foo; print(foo.VERSION)") == "1.0"
    assert index.asked[FOO] >= 2
    assert any("e5e5" in note for note in nodes.notes)
    environment.release()


def other_python() -> str:
    """The minor version of another Python on this machine; empty if there is none."""
    for minor in ("3.12", "3.13", "3.14", "3.11"):
        words = [uv.find_uv_bin(), "python", "find", "--no-project", "--no-python-downloads", minor]
        if minor != _MINOR and subprocess.run(words, capture_output=True).returncode == 0:
            return minor
    return ""


def test_another_python_that_is_here_is_used_and_said(maker: Maker) -> None:
    minor = other_python()
    if not minor:
        pytest.skip("needs a second Python")
    plan = msgspec.structs.replace(maker.plan(FOO), python=minor)
    environment = asyncio.run(maker.environments.make(plan, maker.notes.append))
    code = "import foo, sys; print('{}.{}'.format(*sys.version_info), foo.VERSION)"
    assert said(environment, code) == f"{minor} 1.0"
    assert any("run without the native core" in note for note in maker.notes)
    environment.release()


def archive_of(python: Path, target: Path) -> None:
    """An archive as uv's interpreters come in, of the Python in the folder ``python``."""
    minor = python.name.rpartition(".")[0]
    left_out = ("test", "idlelib", "tkinter", "ensurepip", "site-packages", "__pycache__")

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = set(entry.name.split("/"))
        return None if parts & set(left_out) or entry.name.endswith(".a") else entry

    with tarfile.open(target, "w:gz", compresslevel=1) as archive:
        for name in (f"bin/python{minor}", f"lib/python{minor}"):
            archive.add(python / name, f"python/{name}", filter=kept)
        for library in (python / "lib").glob("libpython*"):
            archive.add(library, f"python/lib/{library.name}")


def test_an_interpreter_comes_from_the_mirror_that_this_machine_names(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror of the test's own. uv's own interpreters were never run."""
    pythons = [
        each
        for each in Path(sys.base_prefix).parent.glob("3.1[1-4].*")
        if not each.name.startswith(f"{_MINOR}.") and each.name.rpartition(".")[0] != other_python()
    ]
    if not pythons or sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("needs another minor version of Python beside this one, unseen by uv")
    version = pythons[-1].name
    major, minor, patch = map(int, version.split("."))
    file = f"cpython-{version}+20260101-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
    (tmp_path / "mirror" / "20260101").mkdir(parents=True)
    archive_of(pythons[-1], tmp_path / "mirror" / "20260101" / file)
    data = (tmp_path / "mirror" / "20260101" / file).read_bytes()
    known = {
        f"cpython-{version}-linux-x86_64-gnu": {
            "name": "cpython", "arch": {"family": "x86_64", "variant": None}, "os": "linux",
            "libc": "gnu", "major": major, "minor": minor, "patch": patch, "prerelease": "",
            "url": "https://github.com/astral-sh/python-build-standalone/releases/download/"
            f"20260101/{file.replace('+', '%2B')}",
            "sha256": hashlib.sha256(data).hexdigest(), "variant": None, "build": "20260101",
        }
    }  # fmt: skip
    (tmp_path / "downloads.json").write_text(json.dumps(known))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(tmp_path / "downloads.json"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", (tmp_path / "mirror").as_uri())
    plan = msgspec.structs.replace(maker.plan(FOO), python=f"{major}.{minor}")
    environment = asyncio.run(maker.environments.make(plan, maker.notes.append))
    code = "import foo, platform; print(platform.python_version(), foo.VERSION)"
    assert said(environment, code) == f"{version} 1.0"
    assert environment.base.is_relative_to(maker.environments.root / "pythons")
    assert maker.notes[0] == f"Python {major}.{minor} is not here: uv fetches it"
    environment.release()


def test_an_interpreter_that_can_not_be_had_is_named(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    plan = msgspec.structs.replace(maker.plan(FOO), python="3.99")
    with pytest.raises(ConfigurationError, match=r"^can't have Python 3\.99: "):
        asyncio.run(maker.environments.make(plan, maker.notes.append))
    assert maker.folders() == []


def test_a_wheel_that_unpacks_to_more_than_fits_is_refused(tmp_path: Path, index: Index) -> None:
    name, data = tiny_wheel("bomb")
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/zeros.bin", bytes(64 << 20))
    assert len(buffer.getvalue()) < 1 << 20
    index.add((name, buffer.getvalue()))
    maker = Maker(tmp_path / "home", index, environments_gb=32 / 1024)
    with pytest.raises(ConfigurationError, match=r"^has no room for 0\.06"):
        maker.made(name)
    assert maker.folders() == []


def test_a_directory_of_a_wheel_without_end_is_not_read(maker: Maker, index: Index) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(160):  # 10 MiB of names in the directory, which say that all is empty
            archive.writestr(f"{number}{'x' * 65_500}", b"")
    index.add(("names-1.0-py3-none-any.whl", buffer.getvalue()))
    with pytest.raises(ConfigurationError, match=r"^can't unpack names.* more than 8 MiB"):
        maker.made("names-1.0-py3-none-any.whl")
    assert maker.folders() == []


def test_a_wheel_that_brings_a_potluck_of_its_own_is_refused(maker: Maker, index: Index) -> None:
    index.add(tiny_wheel("potluck"))
    with pytest.raises(ConfigurationError, match=r"can't keep an environment .* File exists"):
        maker.made("potluck-1.0-py3-none-any.whl")
    assert maker.folders() == []


def test_two_builds_at_once_keep_to_the_quota(tmp_path: Path, index: Index) -> None:
    """Whatever their order, the second finds no room beside what the first has reserved: both would
    fit alone."""
    names = [f"big{number}-1.0-py3-none-any.whl" for number in range(2)]
    for name in names:
        index.add(tiny_wheel(name.split("-")[0], content=os.urandom(2 << 20)))
    maker = Maker(tmp_path / "home", index, environments_gb=6 / 1024)

    async def both() -> list[Environment | BaseException]:
        return await asyncio.gather(*(maker.make(name) for name in names), return_exceptions=True)

    refused, made = sorted(asyncio.run(both()), key=lambda each: isinstance(each, Environment))
    assert isinstance(refused, ConfigurationError)
    assert "has no room for" in str(refused)
    assert isinstance(made, Environment)
    assert len(maker.folders()) == 1
    made.release()


def test_cancelled_at_any_moment_a_build_leaves_nothing(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads go on when its task is cancelled, and must not write after its end."""
    reached, go = threading.Event(), threading.Event()
    complete = making._Build._complete

    def late(build: making._Build) -> None:
        reached.set()
        assert go.wait(60)
        complete(build)

    monkeypatch.setattr(making._Build, "_complete", late)

    async def cancelled() -> None:
        task = asyncio.create_task(maker.make())
        assert await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert maker.folders() == []

    asyncio.run(cancelled())


def add_source(index: Index) -> str:
    """A package without a wheel, and what builds it."""
    index.add(tiny_source("sourced"), tiny_wheel("tinybackend", module=BACKEND))
    return "sourced-1.0.tar.gz"


def test_an_owner_who_lets_nothing_be_built_fetches_nothing(maker: Maker, index: Index) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^builds nothing from source, and there is no wheel of sourced 1\.0 .*ts builds",
    ):
        maker.made(FOO, add_source(index))
    assert index.asked.total() == 0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_a_package_is_built_in_the_sandbox_and_stays_here(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of the owner")
    maker = Maker(tmp_path / "home", index, environments="builds")
    source = add_source(index)
    made = maker.made(FOO, source)
    assert said(made, "import sourced; print(sourced.SAW)") == "('read-only', [], '')"
    assert not list(made.path.rglob("tinybackend"))
    kept = [each.num_bytes for each in maker.environments.kept() if each.is_wheel]
    assert sorted(kept) == sorted(len(index.files[name]) for name in (FOO, TOOL, source))
    made.release()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, index: Index) -> None:
    maker = Maker(tmp_path / "home", index, environments="builds")
    source = add_source(index)
    index.add(tiny_wheel("tinybackend", module="raise RuntimeError('no compiler here')"))
    with pytest.raises(
        ConfigurationError, match=r"^can't build sourced 1\.0 from source: .*no compiler here"
    ):
        maker.made(source)
    index.add(tiny_wheel("tinybackend", module=BACKEND.replace(".split()", '.split()[0], "2.0"')))
    with pytest.raises(ConfigurationError, match=r"^can't build sourced .* declares version 2\.0"):
        maker.made(source)
    assert maker.folders() == []


ENDLESS = """
import os, time
def get_requires_for_build_wheel(settings=None): return []
def build_wheel(directory, settings=None, metadata=None):
    with open(os.path.join(directory, "large"), "wb") as file:
        while True:
            file.write(b"x" * 65536)
            file.flush()
            time.sleep(0.001)
"""
HUNGRY = """
def get_requires_for_build_wheel(settings=None): return []
def build_wheel(directory, settings=None, metadata=None):
    print("before", flush=True)
    bytearray(4 << 30)
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
@pytest.mark.parametrize(
    ("module", "text"),
    [(ENDLESS, r"it takes more than [\d.e-]+ GB of the disk"), (HUNGRY, "MemoryError")],
)
def test_a_build_has_bounds_on_the_disk_and_the_memory(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch, module: str, text: str
) -> None:
    monkeypatch.setattr(making, "_BUILD_BYTES", 4 << 20)
    maker = Maker(tmp_path / "home", index, environments="builds")
    maker.limits.limits = Limits(memory_bytes=2 << 30)
    source = add_source(index)
    index.add(tiny_wheel("tinybackend", module=module))
    with pytest.raises(ConfigurationError, match=rf"^can't build sourced .*{text}"):
        maker.made(source)
    assert maker.folders() == []


def test_of_what_a_command_writes_a_bounded_part_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck._core.cluster.environments.uv._MAX_OUTPUT", 10)
    words = "import sys; print('b' * 9_000_000); sys.stderr.write('a' * 9_000_000 + 'end'); "
    command = [sys.executable, "-c", f"{words}sys.exit(int(sys.argv[1]))"]
    out, said = asyncio.run(run([*command, "0"], directory=tmp_path))
    assert out == "b" * 10
    assert said == "a" * 8189 + "end"
    with pytest.raises(ConfigurationError, match=r"^a{2000}$"):
        asyncio.run(run([*command, "1"], directory=tmp_path))


def test_without_bubblewrap_nothing_is_built(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    maker = Maker(tmp_path / "home", index, environments="builds")
    with pytest.raises(ConfigurationError, match=r"^can't build sourced .*needs bubblewrap"):
        maker.made(add_source(index))
    assert maker.folders() == []


def test_what_uv_can_not_install_leaves_nothing(maker: Maker, index: Index) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("foo/__init__.py", "")
    index.add((FOO, buffer.getvalue()))
    with pytest.raises(ConfigurationError, match=r"^can't install the packages: .*foo"):
        maker.made(FOO)
    assert maker.folders() == []


def states(found: dict[str, Any]) -> list[tuple[bool, str]]:
    return sorted((not each["is_wheel"], each["state"]) for each in found["kept"])


def test_clean_frees_what_no_job_uses(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(maker.settings.home))

    def cleaned(*, dry_run: bool = False, older_than: float = 0.0) -> dict[str, Any]:
        clean(older_than, dry_run, json=True)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    environment = maker.made(FOO)
    assert states(cleaned(dry_run=True)) == [(False, "free"), (True, "in use")]
    assert states(cleaned(older_than=1.0)) == [(False, "kept"), (True, "kept")]
    with maker.environments.wheels.held([maker.wheel(FOO)]):  # an agent makes one more
        assert states(cleaned()) == [(False, "in use"), (True, "in use")]
    found = cleaned()
    assert states(found) == [(False, "removed"), (True, "in use")]
    assert found["freed_bytes"] == maker.wheel(FOO).size
    assert said(environment, "import foo; print(foo.VERSION)") == "1.0"
    environment.release()
    assert states(cleaned()) == [(True, "removed")]
    assert cleaned() == {"version": 2, "freed_bytes": 0, "kept": []}
    assert maker.folders() == []
