"""Kinds of machines, as far as wheels differ between them: system, processor and C library.

A kind is a word that begins like uv's name of a platform: ``x86_64-manylinux_2_36`` (glibc 2.36),
``aarch64-unknown-linux-musl``, ``aarch64-apple-darwin-14.5`` (macOS 14.5). The accelerator follows,
by which torch is chosen: ``+cuda-550.54.15`` (the release of NVIDIA's driver), ``+rocm-gfx90a``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_KIND = re.compile(
    r"(?P<arch>[a-z0-9_]{1,20})-(?:manylinux_2_(?P<glibc>\d{1,3})|(?P<musl>unknown-linux-musl)"
    r"|apple-darwin-(?P<macos>\d{1,3}\.\d{1,3})|(?P<windows>pc-windows-msvc))"
    r"(?:\+(?:cuda-(?P<cuda>\d{1,4}(?:\.\d{1,4}){1,3})|rocm-(?P<rocm>gfx[0-9a-f]{3,6})))?"
)
_OLDER_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Of manylinux_2_17 and so on (PEP 600)."""
_GLIBC = (17, 28, *range(31, 41))
"""The minor versions of glibc that uv knows."""


_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


@functools.cache
def own_kind() -> str:
    """The kind of this machine; empty if it is of none of these systems."""
    machine = platform.machine().lower()
    arch = _ARCHITECTURES.get(machine, machine)
    if sys.platform == "darwin":
        return f"{arch}-apple-darwin-{'.'.join([*platform.mac_ver()[0].split('.'), '0'][:2])}"
    if sys.platform == "win32":
        return f"{arch}-pc-windows-msvc"
    if not sys.platform.startswith("linux"):
        return ""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = ""
    minor = libc.removeprefix("glibc 2.")
    system = f"manylinux_2_{minor}" if minor.isdecimal() else "unknown-linux-musl"
    return f"{arch}-{system}{accelerator_of(_NVIDIA, _AMD)}"


def accelerator_of(nvidia: Path, amd: Path) -> str:
    """The end of the kind of a machine whose drivers have these files; empty without a GPU."""
    with contextlib.suppress(OSError):
        if found := re.search(r"  (\d+\.\d+(?:\.\d+)?)  ", nvidia.read_text(errors="replace")):
            return f"+cuda-{found[1]}"
    for path in sorted(amd.glob("*/properties")):  # of a processor it is 0
        with contextlib.suppress(OSError):
            if found := re.search(r"(?m)^gfx_target_version ([1-9]\d*)$", path.read_text()):
                version = int(found[1])
                return f"+rocm-gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return ""


def platform_of(kind: str) -> tuple[str, dict[str, str]] | None:
    """uv's name for the platform of ``kind``, and variables for uv, by which uv chooses the torch
    for its accelerator as well; None if there is none."""
    found = _KIND.fullmatch(kind)
    if found is None:
        return None
    arch = found["arch"]
    if found["macos"]:
        return f"{arch}-apple-darwin", {"MACOSX_DEPLOYMENT_TARGET": found["macos"]}
    given = {"UV_TORCH_BACKEND": "auto" if found["cuda"] or found["rocm"] else "cpu"}
    given |= {"UV_CUDA_DRIVER_VERSION": found["cuda"]} if found["cuda"] else {}
    given |= {"UV_AMD_GPU_ARCHITECTURE": found["rocm"]} if found["rocm"] else {}
    if found["glibc"]:
        known = [minor for minor in _GLIBC if minor <= int(found["glibc"])]
        return (f"{arch}-manylinux_2_{known[-1]}", given) if known else None
    return kind.partition("+")[0], given


def tags_of(kind: str, python: str) -> dict[Tag, int]:
    """The tags of wheels that machines of ``kind`` can install for this version of CPython, each
    with its rank: 0 fits best. ``kind`` is one that ``platform_of`` knows."""
    version = tuple(map(int, python.split(".")[:2]))
    platforms = list(_platform_tags(kind))
    tags = [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]
    return {tag: rank for rank, tag in enumerate(tags)}


def _platform_tags(kind: str) -> Iterator[str]:
    """The last parts of tags, the best first."""
    found = _KIND.fullmatch(kind)
    assert found is not None
    arch = found["arch"]
    if found["macos"]:
        major, _, minor = found["macos"].partition(".")
        yield from mac_platforms((int(major), int(minor)), arch.replace("aarch64", "arm64"))
    elif found["windows"]:
        yield {"x86_64": "win_amd64", "aarch64": "win_arm64"}.get(arch, arch)
    elif found["musl"]:
        yield from (f"musllinux_1_{minor}_{arch}" for minor in range(2, -1, -1))
        yield f"linux_{arch}"
    else:
        for minor in range(int(found["glibc"]), 4, -1):
            yield f"manylinux_2_{minor}_{arch}"
            if minor in _OLDER_NAMES:
                yield f"{_OLDER_NAMES[minor]}_{arch}"
        yield f"linux_{arch}"


def in_words(kind: str) -> str:
    """``linux aarch64``, ``macOS 14.5 aarch64``."""
    found = _KIND.fullmatch(kind)
    if found is None:
        return kind or "an unknown system"
    system = "linux"
    if found["macos"]:
        system = f"macOS {found['macos']}"
    elif found["windows"]:
        system = "windows"
    elif found["musl"]:
        system = "linux (musl)"
    cuda, rocm = found["cuda"], found["rocm"]
    gpu = f" with CUDA (driver {cuda})" if cuda else f" with ROCm ({rocm})" if rocm else ""
    return f"{system} {found['arch']}{gpu}"
