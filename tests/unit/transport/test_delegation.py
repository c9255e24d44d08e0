"""Certificates of workers: which node and job they prove, and who talks to whom."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.transport import credentials as certificates
from potluck._core.transport.credentials import (
    Credentials,
    Identity,
    era_of,
    identity_of_certificate,
    node_id_of,
)
from potluck._core.transport.delegation import (
    Delegation,
    decode_delegation,
    delegate,
    encode_delegation,
)
from potluck._core.transport.handshake import connect
from potluck._core.transport.listener import Admission, Listener
from potluck._core.wire.greeting import Hello, Welcome
from potluck.errors import Refused, SecurityError

NODE, OTHER, WORKERS = (Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n in (1, 2, 3))
ERAS = (era_of(bytes(32)),)


def credentials_of(key: Ed25519PrivateKey, delegation: Delegation | None = None) -> Credentials:
    return Credentials(key, lambda: ERAS, delegation=delegation)


def worker_of(node: Ed25519PrivateKey, job: str) -> Credentials:
    key = Ed25519PrivateKey.generate()
    return credentials_of(key, delegate(node, key.public_key(), job))


def certificate(key: Ed25519PrivateKey, delegation: Delegation | None) -> bytes:
    """The certificate (DER) that a process shows which holds ``key``, whatever is in it."""
    pem = certificates._chain(key, delegation)
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def test_a_workers_certificate_proves_its_node_and_its_job() -> None:
    mine = delegate(NODE, WORKERS.public_key(), "train-1")
    assert identity_of_certificate(certificate(WORKERS, mine)) == Identity(
        node_id_of(NODE.public_key()), "train-1"
    )
    assert identity_of_certificate(certificate(NODE, None)) == Identity(
        node_id_of(NODE.public_key())
    )
    worker = credentials_of(WORKERS, mine)
    assert (worker.node_id, worker.job) == (node_id_of(NODE.public_key()), "train-1")


FORGED = {
    "another key's": delegate(NODE, OTHER.public_key(), "train-1"),
    "of another job": msgspec.structs.replace(
        delegate(NODE, WORKERS.public_key(), "train-1"), job="train-2"
    ),
    "in another node's name": msgspec.structs.replace(
        delegate(OTHER, WORKERS.public_key(), "train-1"), node=NODE.public_key().public_bytes_raw()
    ),
    "without a right signature": Delegation(
        NODE.public_key().public_bytes_raw(), "train-1", bytes(64)
    ),
    "of no key": Delegation(b"\xff" * 32, "train-1", bytes(64)),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_delegation_that_the_node_did_not_sign_for_this_key_and_job_proves_nothing(
    forged: Delegation,
) -> None:
    with pytest.raises(SecurityError, match="not signed by its node"):
        identity_of_certificate(certificate(WORKERS, forged))
    with pytest.raises(SecurityError, match="not signed by its node"):
        credentials_of(WORKERS, forged)


@pytest.mark.parametrize("job", ["", "x" * 257])
def test_a_delegation_has_a_job_of_bounded_length(job: str) -> None:
    wrong = msgspec.structs.replace(delegate(NODE, WORKERS.public_key(), "x"), job=job)
    with pytest.raises(SecurityError, match="can't be read"):
        decode_delegation(encode_delegation(wrong))
    with pytest.raises(SecurityError, match="can't be read"):
        identity_of_certificate(certificate(WORKERS, wrong))


# -- who talks to whom


@contextlib.contextmanager
def listening(credentials: Credentials) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, credentials)
    listener.serve(lambda hello, node: Admission(Welcome(), lambda link: link.close()))
    try:
        yield listener
    finally:
        listener.close()


def outcome(server: Credentials, client: Credentials, kind: str = "data", job: str = "") -> str:
    """``welcome``, or who refused: ``caller`` or ``server``, and the code of the refusal."""
    with listening(server) as listener:
        hello = Hello(kind, job=job)
        deadline = time.monotonic() + 30
        try:
            link, _ = connect(
                "127.0.0.1", listener.port, hello, client, deadline=deadline, max_retries=0
            )
        except Refused as refused:
            return f"{'caller' if 'is not called' in str(refused) else 'server'}: {refused.code}"
        link.close()
        return "welcome"


def test_workers_of_a_job_talk_to_each_other_and_to_no_other_job() -> None:
    mine, yours = worker_of(NODE, "train-1"), worker_of(OTHER, "train-1")
    assert outcome(mine, yours) == outcome(yours, mine) == "welcome"
    for stranger in (worker_of(OTHER, "train-2"), worker_of(NODE, "train-2")):
        assert outcome(mine, stranger) == outcome(stranger, mine) == "caller: job"
    assert outcome(mine, credentials_of(OTHER)) == "caller: job", "nor to another node itself"
    assert outcome(credentials_of(OTHER), mine) == "caller: job"


def test_the_server_refuses_too_when_the_caller_does_not_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, stranger = worker_of(NODE, "train-1"), worker_of(OTHER, "train-2")
    monkeypatch.setattr(stranger, "refusal_of", lambda peer: None)
    assert outcome(mine, stranger) == "server: job"
    assert outcome(credentials_of(NODE), stranger) == "server: job"


def test_a_worker_is_heard_by_its_own_node_as_a_worker_of_its_job_only() -> None:
    worker, node = worker_of(NODE, "train-1"), credentials_of(NODE)
    assert outcome(node, worker, "worker", "train-1") == "welcome"
    assert outcome(node, worker, "worker", "train-2") == "server: kind"
    for kind in ("client", "node", "measure", "data", "store", "meet", "join", "rendezvous"):
        assert outcome(node, worker, kind, "train-1") == "server: kind", kind


def test_a_ban_of_the_node_is_one_of_its_workers() -> None:
    mine, theirs = worker_of(NODE, "train-1"), worker_of(OTHER, "train-1")
    mine.objects_to = {theirs.node_id: "it was banned by bo"}.get
    assert outcome(mine, theirs) == "server: banned"
    assert outcome(theirs, mine) == "caller: banned"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param((b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x7c"), id="version"),
        pytest.param((b"\x2b\x65\x70\x03\x21", b"\x2b\x65\x72\x03\x21"), id="kind of key"),
        pytest.param((b"\x06\x03\x55\x1d\x0e", b"\x06\x03\x55\x1d\x0f"), id="one extension twice"),
    ],
)
def test_a_certificate_that_no_library_can_read_is_a_security_error(
    change: tuple[bytes, bytes],
) -> None:
    """Whoever has the cluster's secret can show one, and the library raises many exceptions."""
    good = certificate(NODE, None)
    assert change[0] in good
    with pytest.raises(SecurityError, match="can't be read"):
        identity_of_certificate(good.replace(*change))


def test_a_worker_can_not_pass_for_its_nodes_agent() -> None:
    """At the agent's port, after the agent's end."""
    with contextlib.closing(Listener("127.0.0.1", 0, worker_of(NODE, "train-1"))) as listener:
        listener.serve(lambda hello, node: Admission(Welcome(), lambda link: link.close()))
        with pytest.raises(Refused, match="a worker of job 'train-1' answers there"):
            connect(
                "127.0.0.1",
                listener.port,
                Hello("client"),
                credentials_of(NODE),
                deadline=time.monotonic() + 30,
                max_retries=0,
            )
