"""The signature of a job's starter.

The leader of the cluster sends a job's orders to all nodes. Whether a node runs the job depends on
who started it, so that must not be the leader's word: the starter signs the job with its node's
key, and each node checks that before it runs anything.
"""

from __future__ import annotations

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from potluck._core.transport.credentials import node_id_of
from potluck._core.wire.jobs import JobSpec, Proof

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
