"""A Debian for another processor, whose programs run here in QEMU's user mode.

    debian = EmulatedDebian.made("arm64")           # skips the test where that can't be had
    debian.run("python3", "-m", "venv", "/root/venv")

The kernel is told of QEMU in a user namespace of its own (Linux 6.7), so nothing on this machine
changes, and nothing is left behind.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from potluck._core.system import is_root
from support.components import ROOT, program

_MAKE_S = 1200
_PACKAGES = "--include=python3-venv,ca-certificates"
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_ELF = r"\x7fELF\x02\x01\x01" + 9 * r"\x00"
"""The begin of programs of 64 bits, little endian; what follows are their kind and processor."""
_MASK = 7 * r"\xff" + r"\x00" + 8 * r"\xff" + r"\xfe\xff\xff\xff"
_QEMU = {"arm64": ("qemu-aarch64-static", r"\x02\x00\xb7\x00")}
"""For each of Debian's architectures QEMU's program, and the kind and processor in ELF."""

# F: the interpreter is opened now, so it needs not be in the root.
_ENTER = (
    "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc && "
    "printf '%s' \"$1\" >/proc/sys/fs/binfmt_misc/register && "
    'mount --rbind /dev "$2/dev" && mount -t proc proc "$2/proc" && '
    'root=$2 && shift 2 && exec chroot "$root" "$@"'
)


class EmulatedDebian:
    """The root folder of a Debian of ``arch``, with Python and no compiler."""

    def __init__(self, root: Path, arch: str) -> None:
        name, kind = _QEMU[arch]
        qemu = program(name, "qemu-user-static")
        self.root = root
        self._rule = f":{name}:M::{_ELF}{kind}:{_MASK}:{qemu}:F"

    @classmethod
    def made(cls, arch: str) -> EmulatedDebian:
        """One below build/components, made once."""
        if not is_root():
            pytest.skip("needs root, for debootstrap and chroot")
        root = ROOT / "build" / "components" / f"debian-{arch}"
        debian, done = cls(root, arch), root.with_name(f"debian-{arch}.done")
        if not done.exists():
            make = program("debootstrap", "debootstrap")
            shutil.rmtree(root, ignore_errors=True)
            root.parent.mkdir(parents=True, exist_ok=True)
            foreign = ("--foreign", f"--arch={arch}", "--variant=minbase", _PACKAGES)
            command = [make, *foreign, "bookworm", str(root)]
            made = subprocess.run(command, capture_output=True, text=True, timeout=_MAKE_S)
            if made.returncode:
                pytest.skip(f"debootstrap makes no Debian of {arch} here: {made.stdout[-500:]}")
            # Unpacked, not configured: Python needs no more.
            for package in (root / "var/cache/apt/archives").glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", package, root], check=True, timeout=_MAKE_S)
            (root / _CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(f"/{_CERTIFICATES}", root / _CERTIFICATES)
            done.touch()
        probe = debian.run("uname", "-m")
        if probe.returncode:
            pytest.skip(f"this kernel runs no programs of {arch} by QEMU: {probe.stderr[-500:]}")
        return debian

    def run(
        self, *command: str, timeout_s: float = 600.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` in this Debian, with no variables of this process."""
        variables = {"HOME": "/root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})}
        unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]
        enter = [*unshare, "--kill-child", "sh", "-c", _ENTER, "sh", self._rule, str(self.root)]
        return subprocess.run(
            [*enter, *command], env=variables, capture_output=True, text=True, timeout=timeout_s
        )
