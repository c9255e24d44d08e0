"""``potluck launch docker``: the steps of its Dockerfile are carried out in a Debian made by
debootstrap, by chroot, and the container's command trains there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest

from potluck._core.system import SIGKILL
from support.commands import Command
from support.components import ROOT, program
from support.managed import POTLUCK, Work, commands_of

DEBIAN = ROOT / "build" / "components" / "debian"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
# Binds end with the process and those that it starts.
ENTER = (
    'mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && '
    'exec chroot "$1" sh -c \'cd "$1" && shift && exec "$@"\' sh "$2" "${@:3}"'
)


@pytest.fixture(scope="module")
def debian() -> Path:
    """Debian with Python, as an image of Python is."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap and chroot")
    make = program("debootstrap", "debootstrap")
    done = DEBIAN.with_name("debian.done")
    if not done.exists():
        shutil.rmtree(DEBIAN, ignore_errors=True)
        DEBIAN.parent.mkdir(parents=True, exist_ok=True)
        packages = "--include=python3-venv,ca-certificates"
        command = [make, "--variant=minbase", packages, "bookworm", str(DEBIAN)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if made.returncode:
            pytest.skip(f"debootstrap makes no Debian here: {made.stdout[-500:]}")
        shutil.copy(f"/{CERTIFICATES}", DEBIAN / CERTIFICATES)  # this machine's network may need it
        done.touch()
    return DEBIAN


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """potluck without its native core, which takes minutes to build."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "-Cwheel.cmake=false", "-w", str(folder), str(ROOT)], check=True, timeout=300
    )
    [found] = folder.glob("*.whl")
    return found


class Image:
    """What ``docker build`` makes of a Dockerfile: a root, variables, a directory, a command."""

    def __init__(self, base: Path, root: Path, context: Path) -> None:
        subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        self.root, self.context = root, context
        self.variables = {"HOME": "/root", "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.directory = "/"
        self.command: list[str] = []
        for line in (context / "Dockerfile").read_text().splitlines():
            word, _, rest = line.partition(" ")
            getattr(self, f"_{word.lower()}")(rest)

    def inside(self, words: list[str], **more: str) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment of a process in a container of this image."""
        enter = ["unshare", "--mount", "bash", "-c", ENTER, "bash", str(self.root), self.directory]
        return [*enter, *words], self.variables | more

    def _from(self, image: str) -> None:
        assert image == "debian-with-python"

    def _env(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.variables[name] = Template(value).substitute(self.variables)

    def _workdir(self, folder: str) -> None:
        self.directory = folder
        (self.root / folder[1:]).mkdir(parents=True)

    def _copy(self, rest: str) -> None:
        source, target = json.loads(rest)
        assert (source, target) == (".", "/app/")
        shutil.copytree(self.context, self.root / "app", dirs_exist_ok=True)

    def _run(self, rest: str) -> None:
        certificates = {"PIP_CERT": f"/{CERTIFICATES}"}  # as `docker build` on this machine has it
        command, variables = self.inside(json.loads(rest), **certificates)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def _cmd(self, rest: str) -> None:
        self.command = json.loads(rest)


def test_the_image_trains_loses_a_worker_and_ends_well(
    debian: Path, wheel: Path, tmp_path: Path
) -> None:
    work = Work(tmp_path / "context", lambda: run.text)
    shutil.copy(wheel, work.folder)
    [launch, *_] = commands_of("Docker")
    own = ["--from", "debian-with-python", "--install", f"./{wheel.name}"]
    options = [*launch[1:-1], *own, launch[-1]]
    subprocess.run([POTLUCK, *options], cwd=work.folder, check=True, timeout=60)
    image = Image(debian, tmp_path / "root", work.folder)
    assert image.command == ["potluck", "run", "train.py"], shlex.join(image.command)

    # As `docker run IMAGE potluck run --workers 2 train.py`.
    words = [*image.command[:2], "--workers", "2", *image.command[2:]]
    command, variables = image.inside(words)
    with Command(["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *command]) as run:
        step = work.wait_for_world(2)
        os.kill(step.pid, SIGKILL)
        run.wait_for("killed by SIGKILL")
        work.wait_for_world(2, after=step.number)
        (image.root / "app" / "slow").unlink()
        assert run.finish() == 0, run.text
    assert "counted 120960" in run.text
