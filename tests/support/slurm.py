"""A real cluster of Slurm: its controller and nodes on hosts in network namespaces.

    with SlurmCluster(folder, num=3) as cluster:
        job = cluster.submit("train.sbatch")
        cluster.kill(2)                    # node n3 loses its power
        assert cluster.ended(job) == "COMPLETED"

Each node has its host name, its address and its own agents' ports; files are shared, as on a real
cluster. Needs what ``hosts`` needs, and Slurm 22.05 or later with munge.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from support.commands import comes_true
from support.hosts import Host, Network
from support.managed import kill_all, on_host, write_names

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
"""Programs, and Debian's packages with them."""
_START_S = 60.0

_CONF = """\
ClusterName=potluck
SlurmctldHost=login({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """``num`` nodes, n1 and so on, and the host ``login`` with the controller, on which commands
    run. A context manager; what still runs in it is killed at the end."""

    def __init__(self, folder: Path, num: int) -> None:
        self.folder = folder
        self.num = num
        self.network: Network
        self._stack = ExitStack()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        with ExitStack() as stack:
            self.network = stack.enter_context(Network(self.num + 1))
            stack.callback(self._wait_for_ends)
            stack.callback(self.network.close)
            self._configure()
            login = self.network[0]
            self._daemon(
                login,
                *("/usr/sbin/munged", "--foreground", "--force", f"--key-file={self._at('key')}"),
                *(f"--socket={self._at('munge.sock')}", f"--pid-file={self._at('munged.pid')}"),
                *(f"--log-file={self._at('munged.log')}", f"--seed-file={self._at('seed')}"),
            )
            assert comes_true(self._at("munge.sock").exists, _START_S)
            self._daemon(login, "/usr/sbin/slurmctld", "-D")
            for number in range(1, self.num + 1):
                self.start(number)
            assert comes_true(self.is_idle, _START_S), self.run("sinfo", "-N")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, number: int) -> None:
        """Switch node n``number`` on."""
        self.network[number].link(up=True)
        self._daemon(self.network[number], "/usr/sbin/slurmd", "-D", "-N", f"n{number}")

    def kill(self, number: int) -> None:
        """Node n``number`` loses its power: nothing of it runs on, nothing says goodbye."""
        host = self.network[number]
        host.link(up=False)
        kill_all(host)

    def is_idle(self) -> bool:
        """Whether all nodes are up and idle."""
        states = self.run("sinfo", "-h", "-N", "-o", "%T").split()
        return states == ["idle"] * self.num

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """What ``command`` writes on the host ``login``; AssertionError if it fails."""
        done = subprocess.run(
            self._on(self.network[0], command),
            cwd=cwd,
            env=os.environ | self.variables | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def variables(self) -> dict[str, str]:
        """What commands of Slurm need."""
        return {"SLURM_CONF": str(self._at("slurm.conf"))}

    def state(self, job: str) -> str:
        """The state of a job, as ``scontrol`` shows it."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def ended(self, job: str, timeout_s: float = 240.0) -> str:
        """The state in which a job has ended."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")
        assert comes_true(lambda: self.state(job) not in running, timeout_s), self.state(job)
        return self.state(job)

    def _at(self, name: str) -> Path:
        return self.folder / name

    def _configure(self) -> None:
        names = ["login", *(f"n{number}" for number in range(1, self.num + 1))]
        for name in ("state", *(f"spool-n{number}" for number in range(1, self.num + 1))):
            self._at(name).mkdir(parents=True)
        write_names(self._at("hosts"), dict(zip(names, self.network, strict=True)))
        key = self._at("key")
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr={host.address} CPUs=1 RealMemory=2000 "
            "State=UNKNOWN"
            for name, host in zip(names[1:], self.network[1:], strict=True)
        ]
        text = _CONF.format(
            address=self.network[0].address, folder=self.folder, nodes="\n".join(nodes)
        )
        self._at("slurm.conf").write_text(text)

    def _on(self, host: Host, command: tuple[str, ...]) -> list[str]:
        """``command`` on ``host``, where all hosts' names are known."""
        name = f"n{host.index}" if host.index else "login"
        return on_host(host, name, self._at("hosts"), command)

    def _daemon(self, host: Host, *command: str) -> None:
        with self._at(f"{Path(command[0]).name}-{host.index}.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    self._on(host, command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | self.variables,
                    start_new_session=True,
                )
            )

    def _wait_for_ends(self) -> None:
        for process in self._started:
            process.wait()
