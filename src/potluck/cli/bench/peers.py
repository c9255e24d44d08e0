"""The peers of a comparison: a library under test and the settings to run it with, by name.

``potluck bench --against`` takes these names. Peers may share a library: ``potluck-tls`` is potluck
with shared memory switched off.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_SHARED_MEMORY = {"POTLUCK_USE_SHARED_MEMORY": "0"}


@dataclass(frozen=True, slots=True)
class Competitor:
    """One peer, a column of the table. ``module`` is its key in ``LIBRARIES``, ``about`` its line
    in the help, ``needs`` are Python packages and ``program`` an executable that it needs;
    ``install`` is the command that installs them. ``environment`` is added to its workers'
    variables."""

    name: str
    module: str
    about: str
    needs: tuple[str, ...] = ()
    install: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Keyword arguments of potluck's all_reduce."""
    tolerance: float = 1e-4
    """The largest absolute error of a correct sum of standard normal numbers."""
    program: str = ""
    one_launcher: bool = False
    """Whether ``program`` starts all ranks, instead of one process for each."""


PEERS = {
    peer.name: peer
    for peer in (
        Competitor(
            "potluck", "ours", "as it comes: shared memory inside a machine, TLS 1.3 between"
        ),
        Competitor(
            "potluck-tls",
            "ours",
            "shared memory switched off: every byte through TLS 1.3",
            environment=NO_SHARED_MEMORY,
        ),
        Competitor(
            "potluck-python",
            "ours",
            "the Python engine, without the native core",
            environment={"POTLUCK_NATIVE": "0"},
        ),
        *(
            Competitor(
                f"potluck-{algorithm}",
                "ours",
                f"as it comes, but all_reduce always {algorithm}",
                arguments={"algorithm": algorithm},
            )
            for algorithm in ("ring", "hierarchical")
        ),
        Competitor(
            "potluck-bf16",
            "ours",
            "float32 sent as bfloat16, through TLS",
            environment=NO_SHARED_MEMORY,
            arguments={"codec": "bf16"},
            tolerance=0.1,
        ),
        Competitor(
            "potluck-int8",
            "ours",
            "float32 sent as int8 with a scale per block, through TLS",
            environment=NO_SHARED_MEMORY,
            arguments={"codec": "int8"},
            tolerance=0.5,
        ),
        Competitor(
            "gloo",
            "gloo",
            "torch.distributed's CPU backend; TCP, not encrypted",
            needs=("torch",),
            install="pip install 'potluck[torch]'",
        ),
        Competitor(
            "mpi",
            "mpi",
            "Open MPI through mpi4py; shared memory",
            needs=("mpi4py",),
            install="pip install 'potluck[mpi]' and, on Debian or Ubuntu, "
            "apt-get install openmpi-bin",
            program="mpirun",
            one_launcher=True,
        ),
        Competitor(
            "mlx",
            "mlx",
            "MLX's ring backend on the CPU; TCP, not encrypted",
            needs=("mlx",),
            install="pip install mlx" if sys.platform == "darwin" else "pip install 'mlx[cpu]'",
        ),
    )
}

OTHERS = ("gloo", "mpi", "mlx")


def missing(peer: Competitor) -> str:
    """What ``peer`` lacks on this machine and the command that installs it; empty if nothing. No
    package is imported."""
    for package in peer.needs:
        if importlib.util.find_spec(package) is None:
            return f"the Python package {package!r} is not installed: {peer.install}"
    if peer.program and shutil.which(peer.program) is None:
        return f"there is no program {peer.program!r} on the PATH: {peer.install}"
    return ""
