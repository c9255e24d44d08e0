"""What torch can't do in a sandbox without a network: refused at once, with what to do.

Only potluck's own links leave the sandbox (``transport/broker.py``). A store or a group that makes
connections of its own would try to, until torch's time-outs of 5 to 30 minutes pass. Worlds inside
one sandbox, of processes that the script starts itself, work over its loopback and in its /tmp.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from potluck.errors import ConfigurationError
from potluck.torch.process_group.store import LinkStore

_INSTEAD = (
    'Use init_process_group("potluck"), without a store or address; or the owner of this machine '
    "gives scripts the network: POTLUCK_SANDBOX_NETWORK=yes potluck up --sandbox"
)


def check_tcp_store(host_name: str, port: int, *_: Any, **__: Any) -> None:
    """ConfigurationError if no route leads to the store's server. Has the arguments of TCPStore."""
    try:
        places = socket.getaddrinfo(host_name, port or 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        _refuse(f"torch's store at {host_name}:{port} ({error})")
    for family, kind, number, _name, address in places:
        with socket.socket(family, kind, number) as probe:  # UDP: nothing is sent
            try:
                probe.connect(address)
            except OSError:
                continue
            return
    _refuse(f"torch's store at {host_name}:{port}")


def check_file_store(file_name: str, world_size: int = -1, **_: Any) -> None:
    """ConfigurationError if other workers can't see the file. Has the arguments of FileStore."""
    if world_size == 1 or torch.multiprocessing.parent_process() is not None:
        return
    num_beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if world_size > num_beside or not _is_beside_the_script(Path(file_name).absolute().parent):
        _refuse(
            f"the store in {file_name}, which other workers don't see: their sandboxes have only "
            "the job's folder in common, on one machine"
        )


def check_gloo(store: Any, rank: int, size: int, *_: Any, **__: Any) -> None:
    """ConfigurationError for a group of workers. Has the arguments of ProcessGroupGloo."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if size > 1 and isinstance(store, LinkStore):
        _refuse("the workers of a Gloo group, which makes connections of its own")


CHECKS = {
    "TCPStore": check_tcp_store,
    "FileStore": check_file_store,
    "ProcessGroupGloo": check_gloo,
}
"""By the name of the class in ``torch.distributed``."""


def _is_beside_the_script(folder: Path) -> bool:
    """Whether ``folder`` is of the file system with the job's folder: what else can be written to
    is in the memory of this sandbox."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    place = Path(script).parent if script else Path.cwd()
    return folder.exists() and folder.stat().st_dev == place.stat().st_dev


def _refuse(what: str) -> NoReturn:
    raise ConfigurationError(f"this sandbox does not reach {what}. {_INSTEAD}")
