"""What holds in every test: a home of its own, a clean environment, a seed, and nothing left over.

The leak guard compares open descriptors, threads, child processes and /dev/shm from before and
after each test. Things that are on their way out get a bounded time to go; what remains fails the
test and is named.
"""

from __future__ import annotations

import compileall
import gc
import importlib.util
import inspect
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# Before NumPy is imported, here and in the processes of tests. Ranks are threads and processes that
# share the processors; the threads that BLAS would add for each of them mostly wait busily for each
# other (a logistic regression on two ranks: 26 s of processor time, and 2 s without them).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from potluck._core.backends import launchers
from support.figures import Figures
from support.jitter import dawdle
from support.quiet_imports import VARIABLE, ZYGOTE

if TYPE_CHECKING:
    from support.zygote import Zygote

pytest_plugins = ("support.outcomes",)

ALWAYS = 1
SEED = int(os.environ.get("POTLUCK_TEST_SEED") or ALWAYS)
"""`make test-long` and `make jitter` try other random data each time: an unlucky example must fail
where somebody looks for it, not in the check of another change."""
YOUNG_OBJECTS = (5_000, 20, 100)
"""The thresholds of the garbage collector. As Python has them, it took 8% of the processor time of
in-process worlds, half of that to look at old objects, of which it finds few dead."""
GRACE_S = 20.0  # for a busy machine; only a test that leaks waits for all of it

# A shared machine is no reason to fail an example, and a failure must be repeatable by hand.
hypothesis.settings.register_profile(
    "potluck", deadline=None, print_blob=True, derandomize=SEED == ALWAYS
)
hypothesis.settings.load_profile("potluck")
if SEED != ALWAYS:
    hypothesis.core.global_force_seed = SEED  # type: ignore[assignment]  # as --hypothesis-seed does

LAUNCHER_VARIABLES = {
    *re.findall(r'"([A-Z][A-Z0-9_]+)"', inspect.getsource(launchers)),
    *("NODE_RANK", "TORCHELASTIC_RUN_ID"),
}
"""All that the product reads of a launcher, and of torchrun's further ones."""


def pytest_report_header() -> str:
    which = "as always; others: POTLUCK_TEST_SEED=N" if SEED == ALWAYS else "of POTLUCK_TEST_SEED"
    return f"seed: {SEED} ({which})"


# ---------------------------------------------------------------- what a test may ask for


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test's own randomness, printed when the test fails."""
    value = zlib.crc32(request.node.nodeid.encode(), SEED)
    print(f"seed of this test: {value} (POTLUCK_TEST_SEED={SEED})")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="a file that gets what tests measure, as JSON")
    parser.addoption("--python-loop", action="store_true", help="in-process worlds on that loop")
    parser.addoption(
        "--jitter", action="store_true", help="the same, and in-process links dawdle at random"
    )
    parser.addoption("--long", action="store_true", help="run the tests that take minutes, too")


ONLY_NAMED = ("components", "arrays")
"""tests/components installs programs (make test-components). tests/arrays leaves JAX's threads in
its process, which then must not fork: process/test_jax_mlx.py runs it in processes of their own."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The folders ``ONLY_NAMED`` run only when they are named."""
    name = collection_path.name
    if name not in ONLY_NAMED or collection_path.parent != Path(__file__).parent:
        return None
    return True if not any(name in each for each in config.invocation_params.args) else None


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Takes what this test measures: printed, held against what was asked, kept for the tables."""
    name = request.node.nodeid.partition("::")[0] + " -k " + request.node.originalname
    return Figures(name, request.config.getoption("--figures"))


def pytest_configure(config: pytest.Config) -> None:
    # Under PYTHONDONTWRITEBYTECODE each of the hundreds of processes that tests start would
    # compile potluck again, and pytest the tests' assertions at every run.
    sys.dont_write_bytecode = False
    os.environ[VARIABLE] = "1"
    if not hasattr(config, "workerinput"):  # the controller of pytest-xdist, or the only process
        compileall.compile_dir(Path(__file__).parents[1] / "src" / "potluck", quiet=2)
    # A shell ignores SIGINT for what it runs in the background (make test &), and so would every
    # process that a test starts and interrupts.
    # nohup does the same with SIGHUP.
    usual = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL}
    for name, handler in usual.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


SLOWEST_FIRST = (("net", "process", "world", "conformance"), ("unit",), ("architecture",))
"""The folders of tests, by how long their files take: no long file is left for the end. Files of
net and process, which wait for much of their time, alternate with those that compute."""


def in_order(paths: Iterable[Path]) -> dict[Path, tuple[int, float]]:
    """By what to sort the files of tests: their folders' place, then their place in the folder."""
    place = {name: number for number, names in enumerate(SLOWEST_FIRST) for name in names}
    here = Path(__file__).parent
    folders: dict[str, list[Path]] = {}
    for path in paths:
        folders.setdefault(Path(os.path.relpath(path, here)).parts[0], []).append(path)
    return {
        path: (place.get(name, len(place)), number / len(found))
        for name, found in folders.items()
        for number, path in enumerate(found)
    }


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without the garbage collector, which would traverse the million objects
    that this makes again and again, here and in the tests. They stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*YOUNG_OBJECTS)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = in_order(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: order[item.path])
    for item in items:
        # Processes of pytest-xdist must name tests alike.
        assert " at 0x" not in item.nodeid, f"{item.nodeid}: give its parameters ids"
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-long, or --long"))
        if item.get_closest_marker("needs_root_netns"):
            from support import hosts

            if reason := hosts.missing():
                item.add_marker(pytest.mark.skip(reason=reason))


# ---------------------------------------------------------------- without PyTorch

HAS_TORCH = importlib.util.find_spec("torch") is not None
IMPORTS_TORCH = re.compile(r"^(import|from) (torch|potluck\.torch|support\.process_groups)\b", re.M)


class NeedsTorch(pytest.Module):
    """A file of tests that imports torch itself. Other files must not need torch to be imported."""

    def collect(self) -> NoReturn:
        pytest.skip("needs PyTorch, which is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> NeedsTorch | None:
    if HAS_TORCH or not IMPORTS_TORCH.search(module_path.read_text()):
        return None
    return NeedsTorch.from_parent(parent, path=module_path)


# ---------------------------------------------------------------- what every test gets


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(scope="session")
def zygotes(homes: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder with the sockets of the processes from which those are forked that tests start.
    Those of several processes of pytest-xdist are forked from one, but for the rare kind."""
    from support import forked
    from support.zygote import LATER, LIBRARIES, Zygote

    forked.install(is_pytest=True)
    started = [Zygote(homes / LATER, LATER, is_later=True)]
    with pytest.MonkeyPatch.context() as environment:
        if hasattr(request.config, "workerinput"):
            environment.setenv(ZYGOTE, request.config.workerinput["zygotes"])
        started += [Zygote(homes / kind, kind) for kind in LIBRARIES if kind != LATER]
    _zygotes.update(each.pid for each in started)
    for each in started:
        each.wait_until_ready()
    yield homes
    for each in started:
        each.close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller of pytest-xdist, for each of its processes."""
    if HAS_TORCH and sys.platform == "linux":
        from support.zygote import LATER, LIBRARIES, Zygote

        if not _shared:
            folder = Path(tempfile.mkdtemp(prefix="potluck-zygotes-"))
            kinds = [kind for kind in LIBRARIES if kind != LATER]
            _shared.extend(Zygote(folder / kind, kind, is_later=True) for kind in kinds)
        node.workerinput["zygotes"] = str(_shared[0].path.parent)


def pytest_unconfigure() -> None:
    for each in _shared:
        each.close()
    if _shared:
        shutil.rmtree(_shared[0].path.parent)


@pytest.fixture(autouse=True)
def own_environment(
    request: pytest.FixtureRequest, homes: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A POTLUCK_HOME that no other test has (not made yet, like a newcomer's), and no variables
    of an outer launcher."""
    home = homes / f"{zlib.crc32(request.node.nodeid.encode()):08x}-{os.urandom(4).hex()}"
    forget_launchers(monkeypatch)
    monkeypatch.setenv("POTLUCK_HOME", str(home))
    # Two mpiruns at once may both make Open MPI's common folder, and the second one fails.
    monkeypatch.setenv("OMPI_MCA_orte_tmpdir_base", str(homes))
    # Else in /dev/shm, where a test beside this one would take it for a leak of its own.
    monkeypatch.setenv("JOBLIB_TEMP_FOLDER", str(homes))
    if starts_workers(request.node):
        monkeypatch.setenv(ZYGOTE, str(request.getfixturevalue("zygotes")))
    else:
        monkeypatch.delenv(ZYGOTE, raising=False)
    random.seed(SEED)
    return home


@pytest.fixture(scope="module")
def forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """For fixtures of a whole file: what they start may be forked, and has no variables of an outer
    launcher, as what tests start."""
    with pytest.MonkeyPatch.context() as environment:
        forget_launchers(environment)
        if starts_workers(request.node):
            environment.setenv(ZYGOTE, str(request.getfixturevalue("zygotes")))
        yield


def forget_launchers(environment: pytest.MonkeyPatch) -> None:
    """Delete the variables of an outer launcher, and potluck's."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("POTLUCK_"):
            environment.delenv(name)


def starts_workers(tests: pytest.Item | pytest.Module) -> bool:
    """Whether what these tests start may be forked from a process that has imported torch."""
    folder = Path(os.path.relpath(tests.path, Path(__file__).parent)).parts[0]
    may_fork = folder in ("net", "process") and not tests.get_closest_marker("real_exec")
    return may_fork and HAS_TORCH and sys.platform == "linux"


@pytest.fixture
def python_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-process worlds run on the Python loop, for tests that reach into it."""
    monkeypatch.setattr("potluck._core.backends.inprocess.Hub.most_native", 0)


@pytest.fixture(autouse=True)
def options_of_worlds(request: pytest.FixtureRequest) -> None:
    """--python-loop and --jitter. In-process worlds run on the native loop else."""
    jitter = request.config.getoption("--jitter")
    if jitter or request.config.getoption("--python-loop"):
        request.getfixturevalue("python_loop")
    if jitter:
        dawdle(request.getfixturevalue("monkeypatch"), request.getfixturevalue("seed"))


@pytest.fixture(autouse=True)
def nothing_is_left(own_environment: Path) -> Iterator[None]:
    """Fail a test that leaves descriptors, threads, processes or shared memory behind."""
    global _spawned, _began
    _spawned, _began = False, time.clock_gettime(time.CLOCK_BOOTTIME)
    before = left_over(own_environment)
    yield
    remaining = {}
    deadline, pause = time.monotonic() + GRACE_S, 0.005
    while remaining := new_since(before, left_over(own_environment)):
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.2)  # each look, and each collection, takes milliseconds
        if pause > 0.01:  # what only a reference cycle keeps is not a leak; most cycles are young
            gc.collect(1 if pause < 0.2 else 2)
    if remaining:
        put_away(remaining)
        pytest.fail(
            "left behind by this test:\n"
            + "\n".join(f"  {kind} {name}: {what}" for (kind, name), what in remaining.items()),
            pytrace=False,
        )


# ---------------------------------------------------------------- the leak guard's eyes

_spawned = False
_began = 0.0
_zygotes: set[int] = set()
_shared: list[Zygote] = []
_others: set[tuple[str, int]] = set()
"""Shared memory of other processes, by path and inode."""
_TICKS = os.sysconf("SC_CLK_TCK")


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    global _spawned
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
        _spawned = True


sys.addaudithook(_watch)

Things = dict[tuple[str, object], str]


def left_over(home: Path) -> Things:
    """Everything this process holds now, by kind and name."""
    things: Things = {("thread", t.ident): t.name for t in threading.enumerate() if owned(t)}
    things |= {("shared memory", name): f"/dev/shm/{name}" for name in listing("/dev/shm")}
    things |= descriptors()
    if _spawned:  # looking for processes costs milliseconds: only for tests that started some
        things |= {("process", pid): what for pid, what in processes(home).items()}
    return things


def new_since(before: Things, after: Things) -> Things:
    new = {key: what for key, what in after.items() if before.get(key) != what}
    return {key: what for key, what in new.items() if key[0] != "shared memory" or mine(what)}


def owned(thread: threading.Thread) -> bool:
    """Python's stand-ins for threads that C++ started are not ours to join."""
    return not isinstance(thread, threading._DummyThread)


def listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def descriptors() -> Things:
    found: Things = {}
    for number in listing("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed the folder
            continue
        if not what.startswith("/dev/nvidia"):  # CUDA opens these when it likes
            found["descriptor", number] = what
    return found


def processes(home: Path) -> dict[int, str]:
    """Living children of this process, and whoever else was started with this test's home.

    What a fixture of the whole module started before this test is not this test's. The second
    catches orphans: a worker whose agent was killed has another parent by now.
    """
    mark = f"POTLUCK_HOME={home}\0".encode()
    own = {os.getpid(), *_zygotes}
    found = {}
    for entry in listing("/proc"):
        if not entry.isdigit() or int(entry) in own:
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            state, parent, started = stat[0], int(stat[1]), int(stat[19])
            if (parent in own and started >= int(_began * _TICKS)) or (
                state != "Z" and mark in Path(f"/proc/{entry}/environ").read_bytes() + b"\0"
            ):
                line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry)] = f"{line.strip() or 'ended, but nobody waited for it'}"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


_NAMED_BY_PROCESS = re.compile(r"/dev/shm/(?:sem\.loky-|joblib_memmapping_folder_)([0-9]+)")


def is_outside(pid: int) -> bool:
    """Whether this process lives, and neither is this one nor descends from it."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
    return pid != os.getpid()


def mine(path: str) -> bool:
    """False for shared memory that only processes outside of this test run have made or mapped, or
    that is gone. Joblib's folders are never mapped: their names tell. A semaphore is mapped under
    the name that it had before its own: the inode tells."""
    named = _NAMED_BY_PROCESS.match(path)
    if named and is_outside(int(named[1])):
        return False
    try:
        inode = os.stat(path).st_ino
    except FileNotFoundError:
        return False
    if (path, inode) in _others:
        return False
    newest_first = sorted(
        (int(entry) for entry in listing("/proc") if entry.isdigit()), reverse=True
    )
    for entry in ("self", *newest_first):  # reading the maps of all processes takes long
        try:
            if f" {inode} " in Path(f"/proc/{entry}/maps").read_text():
                if entry != "self":
                    _others.add((path, inode))
                return entry == "self"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return True


def put_away(things: Things) -> None:
    """Keep one test's leak from failing the tests after it."""
    for kind, name in things:
        if kind == "process" and isinstance(name, int):
            try:
                os.kill(name, signal.SIGKILL)
                os.waitpid(name, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
