"""What this node proves itself by: its Ed25519 key, its TLS credentials, its signature of jobs.

The key never leaves the node. The leader of the cluster sends a job's orders to all nodes; whether
a node runs the job depends on the job's starter. So the starter signs the job with its node's key,
and each node checks the signature before it runs anything: the leader can't forge it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from potluck._core.cluster.home.keyfile import load_or_create
from potluck._core.cluster.trust.admission_file import ADMISSIONS_FILE, AdmissionFile
from potluck._core.cluster.trust.secret import is_secret_given, load_secret, node_keyring
from potluck._core.cluster.trust.worker_home import load_worker_credentials
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials, era_of, namespace_of, node_id_of
from potluck._core.wire.jobs import JobSpec, Proof
from potluck.errors import IdentityError

KEY_FILE = "node_keypair"


def load_or_create_identity(home: Path) -> Ed25519PrivateKey:
    """The node's key at ``home/node_keypair`` (PKCS#8 PEM, mode 0600), created if missing.

    Processes that start at the same time get the same key. IdentityError if other users may read
    the file, or if it is damaged or can't be created; with what to do.
    """
    path = home / KEY_FILE
    pem = load_or_create(path, "the node's key", _new_key)
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(path, "it holds no private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _damaged(path, "its key is not an Ed25519 key")
    return key


def _new_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _damaged(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f"the node's key {path} is damaged: {why}. Restore it from a backup, or remove it: the "
        "node then gets a new identity, and bans of the old one have no effect on it"
    )


_CONTEXT = b"potluck job 1\0"
"""No other signature of the key can be taken for one of a job."""


def signed(spec: JobSpec, key: Ed25519PrivateKey) -> JobSpec:
    """``spec`` with the proof that the node of ``key`` started it."""
    public = key.public_key().public_bytes_raw()
    return msgspec.structs.replace(spec, proof=Proof(public, key.sign(_signed_bytes(spec))))


def is_by_starter(spec: JobSpec) -> bool:
    """Whether the starter of ``spec`` signed it as it is."""
    if spec.proof is None:
        return False
    key = Ed25519PublicKey.from_public_bytes(spec.proof.key)
    try:
        key.verify(spec.proof.signature, _signed_bytes(spec))
    except InvalidSignature:
        return False
    return node_id_of(key) == spec.starter


def _signed_bytes(spec: JobSpec) -> bytes:
    return _CONTEXT + msgspec.msgpack.encode(msgspec.structs.replace(spec, proof=None))


def load_credentials(settings: Settings) -> Credentials:
    """The credentials of a process that trains: its job's, if an agent started it, else this
    node's. Errors as for ``load_node_credentials`` and ``load_worker_credentials``."""
    if settings.worker_home:
        return load_worker_credentials(Path(settings.worker_home))
    return load_node_credentials(settings)


def load_node_credentials(settings: Settings) -> Credentials:
    """This node's credentials: its key, the cluster's secret, and the list of admitted keys.

    Creates missing files in ``settings.home``, with this node as the founder of a cluster of its
    own, and reads changed files again at each connection. A secret from POTLUCK_PSK or
    POTLUCK_PASSPHRASE never changes. IdentityError or ConfigurationError as for
    ``load_or_create_identity`` and ``load_secret``.
    """
    key = load_or_create_identity(settings.home)
    admissions = load_admissions(settings)
    if is_secret_given(settings):
        eras = (era_of(load_secret(settings)),)
        return Credentials(key, lambda: eras, admissions.objects_to)
    keyring = node_keyring(settings.home)
    admissions.found(key)
    return Credentials(key, keyring.eras, admissions.objects_to)


def load_admissions(settings: Settings) -> AdmissionFile:
    """The list of admitted keys of the cluster that ``settings`` name. Makes no file."""
    if not is_secret_given(settings):
        return AdmissionFile(settings.home)
    # A home may take part in several clusters whose secrets come from variables.
    namespace = namespace_of(load_secret(settings))
    return AdmissionFile(settings.home, f"{ADMISSIONS_FILE}.{namespace[:16]}")
