"""``Sandbox``: what scripts of other members see of this machine, by bubblewrap (``bwrap``).

A worker in it has the system read-only, an empty home and an empty /tmp of its own, its job's
folder to write in, the credentials of its job to read (and nothing else of potluck's home), and no
processes but its own. It has no network: its sockets come from the agent (``broker.py``).
Namespaces of the kernel do that; bubblewrap makes them without any rights.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from potluck._core.system import account_home
from potluck._core.transport.broker import VARIABLE
from potluck.errors import ConfigurationError

_EMPTY = ("/home", "/root", "/tmp", "/var", "/run")
"""Where people's files are, and sockets of services: a read-only folder does not keep a script from
connecting to a Unix socket in it."""
BROKER_FILE = "broker"
"""The name of the broker's socket in the folder of a job's credentials."""

_GPU_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")
_PROBE_S = 60.0
_INSTALL = (
    "--sandbox needs bubblewrap, the command bwrap: apt install bubblewrap, dnf install bubblewrap "
    "(Linux only)"
)


class Sandbox:
    """The sandbox of an agent with potluck's ``home``. ``readable`` are files and folders that
    scripts may read although they are in a home; ``gpus`` as in ``Limits``."""

    def __init__(
        self,
        home: Path,
        readable: Iterable[Path],
        gpus: tuple[str, ...] | None = None,
        *,
        has_network: bool = False,
    ) -> None:
        """``has_network``: scripts use the machine's network. ConfigurationError if no worker could
        run in it, with what to do."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigurationError(_INSTALL)
        self._bwrap = bwrap
        self._home = home.resolve()
        self.has_network = has_network
        self._readable = [path.expanduser().absolute() for path in readable]
        for path in self._readable:
            if not path.exists():
                raise ConfigurationError(f"POTLUCK_SANDBOX_READ: there is no {path}")
        self._gpus = gpus
        self._probe()

    def variables(self, worker_home: Path) -> dict[str, str]:
        """Variables of workers in the sandbox. They can't open each other's memory, so workers of
        one machine talk over the loopback."""
        broker = {} if self.has_network else {VARIABLE: str(worker_home / BROKER_FILE)}
        return {"TMPDIR": "/tmp", "POTLUCK_USE_SHARED_MEMORY": "no", **broker}

    def command(
        self,
        folders: Iterable[Path],
        directory: Path,
        worker_home: Path,
        memory_bytes: int = 0,
        environment: Iterable[Path] = (),
    ) -> list[str]:
        """What to put before the command of a worker that runs in ``directory``, may write in
        ``folders``, has its job's credentials in ``worker_home``, and can read the folders of its
        ``environment``. Its files in memory take ``memory_bytes`` at most (0: as the system bounds
        them)."""
        empty = self._empty()
        in_memory = [*empty, self._home]
        sizes = {str(path): memory_bytes // 4 // len(in_memory) for path in in_memory}
        sizes |= dict.fromkeys(("/tmp", "/dev/shm"), 3 * memory_bytes // 8)

        def emptied(path: str) -> list[str]:
            size = ["--size", str(sizes[path])] if memory_bytes else []
            return [*size, "--tmpfs", path]

        words = [
            *(self._bwrap, "--die-with-parent", "--unshare-user", "--unshare-pid"),
            *("--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"),
            *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
        ]
        if not self.has_network:
            words += ["--unshare-net"]
        for device in self._devices():
            words += ["--dev-bind-try", device, device]
        # The script could fill /dev itself, too.
        words += [*emptied("/dev/shm"), "--remount-ro", "/dev"]
        for path in empty:
            words += emptied(str(path))
        for path in _installed():
            # Not a folder that holds what is to be hidden.
            if _is_in(path, empty) and not any(each.is_relative_to(path) for each in empty):
                words += ["--ro-bind", str(path), str(path)]
        for path in self._readable:
            words += ["--ro-bind", str(path), str(path)]
        words += [*emptied(str(self._home)), "--ro-bind", str(worker_home), str(worker_home)]
        for path in environment:
            if _is_in(path, [*empty, self._home]):
                words += ["--ro-bind", str(path), str(path)]
        for folder in folders:
            words += ["--bind", str(folder), str(folder)]
        return [*words, "--chdir", str(directory), "--"]

    def _empty(self) -> list[Path]:
        """The folders that are empty in the sandbox, outer ones first."""
        homes = (account_home(), Path.home(), *map(Path, _EMPTY))
        return sorted({path.resolve() for path in homes if path.is_dir() and path != Path("/")})

    def _devices(self) -> list[str]:
        if self._gpus == ():
            return []
        cards = [path.name for path in Path("/dev").glob("nvidia[0-9]*")]
        if self._gpus is not None and all(gpu.isdecimal() for gpu in self._gpus):
            cards = [f"nvidia{gpu}" for gpu in self._gpus]
        return [f"/dev/{name}" for name in (*sorted(cards), *_GPU_DEVICES, "kfd", "dri")]

    def _probe(self) -> None:
        """Start Python and potluck in the sandbox once."""
        folder = self._home / "code_store"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = self.command([folder], folder, folder)
        command = [*words, sys.executable, "-c", "import potluck._core.native"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigurationError(f"--sandbox: bwrap does not work here: {error}") from error
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigurationError(
                f"--sandbox: no worker can run in it here: {said[:400]}. If user namespaces are "
                "off, switch them on (sysctl user.max_user_namespaces, "
                "kernel.unprivileged_userns_clone=1; on Ubuntu an AppArmor profile for bwrap)"
            )


def _installed() -> list[Path]:
    """Where Python, its packages and potluck are; and the names of name servers, which is a link
    into /run on many systems."""
    name_servers = str(Path("/etc/resolv.conf").resolve())
    package = str(Path(__file__).parents[3])
    places = (sys.prefix, sys.base_prefix, *sys.path, package, name_servers)
    return sorted({Path(place).absolute() for place in places if place and Path(place).exists()})


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.resolve().is_relative_to(each) for each in folders)
