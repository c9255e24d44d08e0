"""The facts about this machine: cores, memory, accelerators, addresses of its interfaces, versions.

PyTorch is not imported for this: it takes seconds and hundreds of megabytes. Accelerators are read
from the files of their drivers."""

from __future__ import annotations

import functools
import ipaddress
import platform
import socket
import sys
from pathlib import Path

import psutil

from potluck._core import native
from potluck._core.cluster.environments.kinds import own_kind
from potluck._core.optional import installed
from potluck._core.system import usable_cpus
from potluck._core.wire.facts import MAX_ADDRESSES, Address, NodeFacts
from potluck._core.wire.format import Versions
from potluck._core.wire.versions import NEWEST


@functools.cache
def own_versions() -> Versions:
    """The versions in this interpreter. Imports none of the packages; costs some milliseconds."""
    return Versions(
        python=platform.python_version(),
        potluck=installed("potluck"),
        torch=installed("torch").partition("+")[0],  # +cpu and +cu128 are one release
        numpy=installed("numpy"),
        machine=platform.machine(),
        byte_order=sys.byteorder,
        executable=sys.executable[:256] if sys.executable.isprintable() else "",
        kind=own_kind(),
        protocol=NEWEST,
    )


_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def own_facts(node: str, site: str = "") -> NodeFacts:
    """The facts about this machine, which is ``node`` at ``site``, at this moment. Costs about a
    millisecond."""
    return NodeFacts(
        node=node,
        cores=len(usable_cpus()),
        memory_bytes=psutil.virtual_memory().total,
        accelerators=own_accelerators(),
        addresses=own_addresses(),
        engine="native" if native.available else "python",
        site=site,
    )


def own_accelerators() -> tuple[str, ...]:
    """The names of GPUs: NVIDIA's and AMD's as their Linux drivers list them, Apple's by the chip.

    Other accelerators are not found here. A job's workers report the device that they use.
    """
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ("Apple GPU",)
    return (*_nvidia(_NVIDIA), *_amd(_AMD))


def own_addresses() -> tuple[Address, ...]:
    """All addresses of interfaces that are up, without loopback and link-local IPv6 addresses."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        if state is None or not state.isup:
            continue
        for each in addresses:
            if each.family not in (socket.AF_INET, socket.AF_INET6) or not each.netmask:
                continue
            host = each.address.partition("%")[0]
            try:
                network = ipaddress.ip_network((host, _bits(each.netmask)), strict=False)
            except ValueError:
                continue
            ip = ipaddress.ip_address(host)
            if ip.is_loopback or (ip.version == 6 and ip.is_link_local):
                continue
            found.append(Address(host, str(network), name[:256], max(state.speed, 0) * 125_000.0))
    return tuple(found[:MAX_ADDRESSES])


def _bits(netmask: str) -> int:
    """The prefix length of a netmask."""
    return int(ipaddress.ip_address(netmask.partition("/")[0])).bit_count()


def _nvidia(root: Path) -> list[str]:
    names = []
    for path in sorted(root.glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
        names.append((models or ["NVIDIA GPU"])[0][:256])
    return names


def _amd(root: Path) -> list[str]:
    names = []
    for path in sorted(root.glob("*/properties")):
        try:
            words = dict(line.split()[:2] for line in path.read_text().splitlines() if " " in line)
            name = (path.parent / "name").read_text().strip()
        except (OSError, ValueError):
            continue
        if words.get("simd_count", "0") != "0":  # the driver lists the CPU as a node as well
            names.append((name or "AMD GPU")[:256])
    return names
