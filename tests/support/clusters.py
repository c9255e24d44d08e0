"""Homes whose machines are in one cluster, made without pairing them one by one."""

from __future__ import annotations

from pathlib import Path

from potluck._core.cluster.trust import operator, secret
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.credentials import load_admissions, load_or_create_identity
from potluck._core.settings import Settings
from potluck._core.transport.credentials import node_id_of


def found_cluster(*homes: Path, psk: bytes = b"o" * 32) -> list[str]:
    """Make one cluster of ``homes``, the first of which is its founder; the nodes' ids."""
    keys = [load_or_create_identity(home) for home in homes]
    first = AdmissionFile(homes[0])
    first.found(keys[0])
    for home, key in zip(homes[1:], keys[1:], strict=True):
        operator.admit(first, keys[0], key.public_key().public_bytes_raw(), name=home.name)
    admissions = first.load()
    assert admissions is not None
    for home in homes:
        secret.replace_secret(home, psk)
        if home != homes[0]:
            AdmissionFile(home).take_over(admissions.founding, admissions.records)
    return [node_id_of(key.public_key()) for key in keys]


def lock(*homes: Path, psk: str) -> None:
    """Close the open cluster of ``homes``, whose secret comes from a variable: the first is its
    founder, the others its members."""
    keys = [load_or_create_identity(home) for home in homes]
    files = [load_admissions(Settings(home=home, psk=psk)) for home in homes]
    public = [key.public_key().public_bytes_raw() for key in keys]
    names = [home.name for home in homes]
    operator.lock(files[0], keys[0], list(zip(public[1:], names[1:], strict=True)))
    admissions = files[0].load()
    assert admissions is not None
    for file in files[1:]:
        file.take_over(admissions.founding, admissions.records)


def admit(host: Path, home: Path) -> str:
    """Bring the machine of ``home`` into the cluster of ``host``, an admin; the node's id."""
    key = load_or_create_identity(home)
    file = AdmissionFile(host)
    public = key.public_key().public_bytes_raw()
    operator.admit(file, load_or_create_identity(host), public, name=home.name)
    admissions = file.load()
    assert admissions is not None
    AdmissionFile(home).take_over(admissions.founding, admissions.records)
    secret.replace_secret(home, bytes.fromhex((host / "cluster_secret").read_text()))
    return node_id_of(key.public_key())


def ban(host: Path, node: str, reason: str = "", *, psk: bytes | None = None) -> None:
    """Ban ``node`` in the list of ``host``, an admin; ``psk`` is the next secret."""
    operator.revoke(AdmissionFile(host), load_or_create_identity(host), node, reason, psk=psk)
    if psk is not None:
        secret.change_secret(host, psk)
