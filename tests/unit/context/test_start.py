"""``init`` with what is not there: each backend that can't be used says in one sentence why."""

from __future__ import annotations

import builtins
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

import potluck
from potluck._core.context.start import BACKENDS
from potluck.errors import ConfigurationError, MissingDependency
from support.ports import reserved_ports


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package look as if it were not installed."""

    def block(package: str) -> None:
        class Missing:
            @staticmethod
            def find_spec(name: str, path: Any = None, target: Any = None) -> None:
                if name.partition(".")[0] == package:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)

    return block


def world(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (defaults | variables).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["glooo", "", "GLOO", "tcp"])
def test_a_wrong_name_brings_the_right_ones(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        potluck.init(name)
    hint = " (write 'gloo')" if name == "GLOO" else ""
    told = f"backend {name!r} is unknown; choose from {', '.join(BACKENDS)}{hint}"
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("backend", "package", "sentence"),
    [
        ("gloo", "torch", "'torch', which is not installed: pip install 'potluck[torch]'"),
        ("nccl", "torch", "'torch', which is not installed: pip install 'potluck[torch]'"),
        (
            "mpi",
            "mpi4py",
            "'mpi4py', which is not installed: pip install 'potluck[mpi]', and an MPI library "
            "(Debian, Ubuntu: apt-get install openmpi-bin)",
        ),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_pip_command(
    backend: str,
    package: str,
    sentence: str,
    without: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world(monkeypatch)
    without(package)
    with pytest.raises(MissingDependency) as caught:
        potluck.init(backend)
    assert str(caught.value) == f"this needs the Python package {sentence}"


def test_mpi4py_without_an_mpi_library_says_which_package_brings_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'potluck[mpi]'")
    real = builtins.__import__

    def refuse(name: str) -> Any:
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library\nlibmpi.so.40: cannot open")
        return real(name)

    monkeypatch.setattr("importlib.import_module", lambda name: refuse(name))
    with pytest.raises(MissingDependency) as caught:
        potluck.init("mpi")
    assert str(caught.value) == (
        "mpi4py finds no MPI library (cannot load MPI library); install one (Debian, Ubuntu: "
        "apt-get install openmpi-bin)"
    )


def test_nccl_without_a_gpu_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    world(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"needs a CUDA GPU.*use backend='gloo'"):
        potluck.init("nccl")


def test_nccl_with_more_workers_than_gpus_says_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    world(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    with pytest.raises(ConfigurationError, match="start at most 1 workers on it"):
        potluck.init("nccl")


@pytest.mark.parametrize("backend", ["env", "gloo"])
def test_a_rank_outside_its_world_is_refused_before_anything_is_opened(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "gloo":
        pytest.importorskip("torch")
    world(monkeypatch, RANK="2", WORLD_SIZE="2")
    with pytest.raises(ConfigurationError, match="RANK=2 is not below WORLD_SIZE=2"):
        potluck.init(backend)


@pytest.mark.parametrize("backend", ["env", "gloo"])
def test_a_master_port_in_use_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        world(monkeypatch, WORLD_SIZE="2", MASTER_PORT=str(port))
        with pytest.raises(ConfigurationError) as caught:
            potluck.init(backend, timeout_s=2)
    assert f"rank 0 can't listen at MASTER_PORT={port}: another program does" in str(caught.value)
    assert "set another MASTER_PORT on all ranks" in str(caught.value)


def test_mpi_in_another_world_than_the_launchers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is when mpi4py was built for another MPI than the mpirun that started the script."""
    world(monkeypatch, RANK="1", WORLD_SIZE="4")

    class Mpi:
        COMM_WORLD = type("World", (), {"size": 1})

        @staticmethod
        def Get_library_version() -> str:
            return "Open MPI v4, package: X\n"

    monkeypatch.setattr("potluck._core.backends.mpi._load", lambda: Mpi)
    with pytest.raises(
        ConfigurationError, match="MPI sees a world of 1, but environment started 4"
    ):
        potluck.init("mpi")


def test_a_ring_without_addresses_shows_how_to_give_them() -> None:
    with pytest.raises(ConfigurationError, match=r"potluck.init\('ring', peers=\["):
        potluck.init("ring")
    with pytest.raises(ConfigurationError, match="peers and rank are for backend='ring'"):
        potluck.init("local", rank=1)


def test_a_ring_of_one_is_there_at_once() -> None:
    with (
        reserved_ports(1) as [port],
        potluck.init("ring", peers=[f"127.0.0.1:{port}"], rank=0, timeout_s=5) as context,
    ):
        assert context.world_size == 1


def test_a_second_context_of_one_world_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserved_ports(1) as [port]:
        pass
    world(monkeypatch, MASTER_PORT=str(port))
    told = (
        f"this process has a context already: rank 0 of 1, in the world at 127.0.0.1:{port}. Use "
        "that one, or close it before the next potluck.init()"
    )
    with potluck.init() as ctx:
        for backend in ("auto", "env", "gloo"):
            with pytest.raises(ConfigurationError) as caught:
                potluck.init(backend)
            assert str(caught.value) == told
        with potluck.init("local") as other:
            assert (other.world_size, ctx.world_size) == (1, 1)
    with potluck.init() as ctx:
        assert ctx.rank == 0


def test_so_is_a_second_context_at_one_address_of_a_ring() -> None:
    with reserved_ports(1) as [port]:
        pass
    peers = [f"127.0.0.1:{port}"]
    told = f"already: rank 0 of 1, in the world at {peers[0]}"
    with (
        potluck.init("ring", peers=peers, rank=0),
        pytest.raises(ConfigurationError, match=told),
    ):
        potluck.init("ring", peers=peers, rank=0)
