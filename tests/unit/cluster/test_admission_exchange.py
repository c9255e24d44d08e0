"""The exchange of records: who is given the cluster's next secret."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.admission_exchange import AdmissionExchange
from potluck._core.cluster.trust import operator
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.admissions import Admissions
from potluck._core.cluster.trust.secret import load_secret
from potluck._core.settings import Settings
from potluck._core.transport.credentials import namespace_of, node_id_of
from potluck._core.wire.admissions import Secret, SecretWanted
from support.links import make_credentials


class Links:
    """Links that go nowhere: what was sent is kept."""

    nodes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.on_linked: list[Any] = []
        self.on_ended: list[Any] = []

    def on(self, kind: object, receive: Any) -> None:
        self.receive = receive

    def send(self, node: str, message: object) -> None:
        self.sent.append((node, message))


def test_the_next_secret_goes_only_to_those_who_know_of_the_ban(tmp_path: Path) -> None:
    """A banned node can show a neighbour the record of the new secret without the record of its
    ban. The neighbour, given the secret, would give it to the banned node, a member to its
    knowledge."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    settings = Settings(home=home)
    key, bob, thief = (Ed25519PrivateKey.generate() for _ in range(3))
    file = AdmissionFile(home)
    file.found(key)
    for each in (bob, thief):
        operator.admit(file, key, each.public_key().public_bytes_raw())
    psk = load_secret(settings)
    operator.revoke(file, key, node_id_of(thief.public_key()), psk=psk)
    links = Links()
    AdmissionExchange(
        settings,
        key,
        file,
        make_credentials(psk, key),
        cast(Any, links),
        watched=lambda: (),
        on_barred=lambda nodes, new: None,
        on_note=lambda text: None,
        on_broken=cast(Any, SimpleNamespace()),
    )
    whole = file.load()
    assert whole is not None
    hidden = [each for each in whole.records if getattr(each, "verdict", "") != "revoked"]
    partial = Admissions(whole.founding, hidden)
    asker, namespace = node_id_of(bob.public_key()), namespace_of(psk)
    assert partial.roster.namespace == namespace, "the neighbour does not ask"

    links.receive(asker, SecretWanted(namespace, partial.digest))
    assert links.sent == [], "a node that does not know of the ban was given the secret"

    links.receive(asker, SecretWanted(namespace, whole.digest))
    assert links.sent == [(asker, Secret(psk))]
