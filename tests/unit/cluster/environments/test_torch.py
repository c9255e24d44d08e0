"""Each kind of machine gets the torch for its accelerator: from indexes of the test's own, which
answer for those of PyTorch. PyTorch's own wheels for CUDA and ROCm were never run."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from potluck._core.cluster.environments import planning
from potluck._core.cluster.environments.kinds import accelerator_of, in_words, platform_of
from potluck._core.cluster.environments.plan import Plan
from potluck._core.cluster.environments.sources import find_source
from support.package_index import tiny_wheel
from support.public_hosts import Hosts, add_project, public_hosts

CPU = "x86_64-manylinux_2_36"
CUDA = f"{CPU}+cuda-550.54.15"
NEWER = f"{CPU}+cuda-580.65.6"
ROCM = f"{CPU}+rocm-gfx90a"
TAG = "py3-none-manylinux_2_28_x86_64"
PYTORCH, PYPI = "download.pytorch.org", "pypi.org"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the hosts were asked for: PyTorch's, with a torch 2.9.0 and 2.8.0 for each accelerator,
    and PyPI."""
    monkeypatch.setattr(planning, "_own_requirements", lambda: ["own"])
    hosts: Hosts = {}
    for backend in ("cpu", "cu126", "cu128", "cu129", "cu130", "rocm6.4", "rocm7.0"):
        wheels = [
            tiny_wheel("torch", f"{release}+{backend}", tag=TAG) for release in ("2.8.0", "2.9.0")
        ]
        add_project(hosts, PYTORCH, f"/whl/{backend}/torch", *wheels)
    add_project(hosts, PYPI, "/simple/own", tiny_wheel("own"))
    add_project(hosts, PYPI, "/simple/triton", tiny_wheel("triton"))
    of_pypi = [tiny_wheel("torch", release, tag=TAG) for release in ("2.8.0", "2.9.0")]
    add_project(hosts, PYPI, "/simple/torch", *of_pypi)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it would keep another test's proxy
    with public_hosts(hosts, tmp_path) as (variables, asked):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
            monkeypatch.setenv(name.lower(), value)
        yield asked


def plan_of(folder: Path, *kinds: str) -> Plan:
    source = find_source(folder, folder / "train.py")
    assert source is not None
    return asyncio.run(
        planning.make_plan(
            replace(source), kinds, folder=folder / "plans", index="", note=lambda text: None
        )
    )


def torch_of(plan: Plan, kind: str) -> str:
    (found,) = (each.version for each in plan.part(kind).wheels if each.name == "torch")
    return found


def test_each_kind_has_the_torch_for_its_accelerator(tmp_path: Path, asked: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("# /// script\n# dependencies = ['torch<2.9']\n# ///\n")
    plan = plan_of(tmp_path, CPU, CUDA, NEWER, ROCM)
    assert torch_of(plan, CPU) == "2.8.0+cpu"
    assert torch_of(plan, CUDA).startswith("2.8.0+cu12")
    assert torch_of(plan, NEWER) == "2.8.0+cu130"
    assert torch_of(plan, ROCM).startswith("2.8.0+rocm")
    hosts = {each.url.split("/")[2] for each in plan.part(CUDA).wheels}
    assert hosts == {PYTORCH, PYPI}
    plan_before, num_asked = plan, len(asked)
    assert plan_of(tmp_path, CPU, CUDA, NEWER, ROCM) == plan_before
    assert len(asked) == num_asked  # a second run asks no index


def test_the_release_of_a_lock_stays_and_its_accelerator_does_not(
    tmp_path: Path, asked: list[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    digest = "0" * 64
    packages = "".join(
        f"[[packages]]\nname = '{name}'\nversion = '{version}'\nwheels = [{{ url = "
        f"'https://example.org/x.whl', hashes = {{ sha256 = '{digest}' }} }}]\n"
        for name, version in (("torch", "2.8.0"), ("nvidia-cublas-cu12", "12.8.4.1"))
    )
    (tmp_path / "pylock.toml").write_text(f"lock-version = '1.0'\n{packages}")
    plan = plan_of(tmp_path, CPU, CUDA)
    assert torch_of(plan, CPU) == "2.8.0+cpu"
    assert {each.name for each in plan.part(CPU).wheels} == {"torch", "own"}
    assert torch_of(plan, CUDA).startswith("2.8.0+cu12")


@pytest.mark.parametrize(
    ("driver", "kind"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
            "570.86.15",
        ),
    ],
)
def test_the_driver_of_nvidia_says_its_release(tmp_path: Path, driver: str, kind: str) -> None:
    (tmp_path / "version").write_text(driver)
    assert accelerator_of(tmp_path / "version", tmp_path / "none") == f"+cuda-{kind}"
    found = platform_of(f"{CPU}+cuda-{kind}")
    assert found == (CPU, {"UV_TORCH_BACKEND": "auto", "UV_CUDA_DRIVER_VERSION": kind})


def test_the_driver_of_amd_says_the_architecture_of_the_first_gpu(tmp_path: Path) -> None:
    for number, version in enumerate((0, 90010, 110001)):
        (tmp_path / str(number)).mkdir()
        text = f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        (tmp_path / str(number) / "properties").write_text(text)
    assert accelerator_of(tmp_path / "none", tmp_path) == "+rocm-gfx90a"
    assert accelerator_of(tmp_path / "none", tmp_path / "none") == ""
    assert in_words(ROCM) == "linux x86_64 with ROCm (gfx90a)"
    assert in_words(CUDA) == "linux x86_64 with CUDA (driver 550.54.15)"
