"""What people order about the cluster's list of admitted keys: admit, ban, lock, change the secret.

Each order is signed with this node's key, which must be an admin's, and written to this node's
file. The agent passes it on; without a running agent the other machines learn of it when
``potluck up`` runs here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.cluster.trust.admission_file import AdmissionFile
from potluck.cluster.trust.admissions import Admissions, Entry, now_of, sign
from potluck.errors import ConfigurationError
from potluck.transport.credentials import namespace_of, node_id_of, node_id_of_bytes
from potluck.wire.admissions import Admission, Founding, Record, SecretChange, Verdict

DAY_S = 86_400


def admit(
    file: AdmissionFile,
    me: Ed25519PrivateKey,
    key: bytes,
    *,
    name: str = "",
    verdict: Verdict = "member",
    days: float = 0.0,
) -> None:
    """Admit ``key`` (32 bytes) as ``verdict``, for ``days`` (0: without end)."""
    if verdict == "admin" and days:
        raise ConfigurationError("the admission of an admin can't end: leave --days out")

    def make(admissions: Admissions) -> Sequence[Record]:
        word = _speaker(admissions, me)
        expires = int(time.time() + days * DAY_S) if days else 0
        return [word(key, verdict, 0, expires=expires, name=name[:64])]

    file.change(make)


def revoke(
    file: AdmissionFile,
    me: Ed25519PrivateKey,
    node: str,
    reason: str = "",
    *,
    psk: bytes | None,
    store: Callable[[bytes], None] = lambda psk: None,
    delete_code: bool = False,
) -> tuple[str, ...]:
    """Ban ``node``; the nodes that it had admitted, which stay, by a word of this node.

    ``psk`` is the cluster's next secret, which ``store`` stores, None if it can't be changed
    here. ConfigurationError if this node may not ban that one.
    """
    kept: list[str] = []

    def make(admissions: Admissions) -> Sequence[Record]:
        entry = admissions.roster.entries.get(node)
        if entry is None:
            raise ConfigurationError(
                f"node {node[:12]} is not on the list of admitted keys: it is not in the cluster, "
                "and no machine talks to it. `potluck nodes` shows the list"
            )
        if entry.role == "founder":
            raise ConfigurationError(
                f"node {node[:12]} founded the cluster and can't be banned. If it was stolen, "
                "found a new cluster: remove ~/.potluck on a machine that you trust, and pair anew"
            )
        if node == node_id_of(me.public_key()):
            raise ConfigurationError("a machine can't ban itself; run the command on another one")
        word = _speaker(admissions, me, without=entry.key)
        records: list[Record] = []
        for said in admissions.signed_by(entry.key):
            kept.append(node_id_of_bytes(said.key))
            records.append(
                word(said.key, said.verdict, len(records) + 1, expires=said.expires, name=said.name)
            )
        words = {"name": entry.name, "reason": reason[:200], "delete_code": delete_code}
        records.insert(0, word(entry.key, "revoked", 0, **words))
        if psk is not None:
            records.append(_secret(admissions, me, psk, without=entry.key, offset=len(records)))
        return records

    def before(changed: Admissions) -> None:
        if changed.roster.entries[node].role != "revoked":
            raise ConfigurationError(
                f"node {node[:12]} is an admin that is senior to this machine: ban it on "
                f"{_seniors(changed)}"
            )
        if psk is not None:
            store(psk)

    file.change(make, before)
    return tuple(kept)


def change_of_secret(
    file: AdmissionFile,
    me: Ed25519PrivateKey,
    psk: bytes,
    store: Callable[[bytes], None] = lambda psk: None,
) -> None:
    """Make ``psk`` the cluster's secret from now on; ``store`` stores it here."""
    file.change(lambda admissions: [_secret(admissions, me, psk)], lambda changed: store(psk))


def lock(file: AdmissionFile, me: Ed25519PrivateKey, others: Collection[tuple[bytes, str]]) -> None:
    """Close an open cluster: this node is its founder, and ``others`` (keys and names) its
    members. IdentityError if it is closed already."""
    founding = Founding(me.public_key().public_bytes_raw(), secrets.token_bytes(16))
    word = _speaker(Admissions(founding), me)
    records = [
        word(key, "member", index, name=name[:64]) for index, (key, name) in enumerate(others)
    ]
    file.create(founding, records)


def end_expired(file: AdmissionFile, me: Ed25519PrivateKey) -> None:
    """Where this node is an admin: revoke the keys whose admission has ended, so that machines with
    a wrong clock know as well."""
    admissions = file.load()
    if admissions is None or not admissions.roster.is_admin(node_id_of(me.public_key())):
        return

    def over(admissions: Admissions) -> list[Entry]:
        at = now_of(time.time(), admissions.roster)
        return [each for each in admissions.roster.entries.values() if each.has_ended(at)]

    def make(admissions: Admissions) -> Sequence[Record]:
        word = _speaker(admissions, me)
        return [
            word(each.key, "revoked", index, reason="its admission has ended")
            for index, each in enumerate(over(admissions))
        ]

    if over(admissions):
        file.change(make)  # where an admission that was renewed meanwhile counts


def new_secret() -> bytes:
    """A random secret, 32 bytes."""
    return secrets.token_bytes(32)


_Word = Callable[..., Admission]


def _speaker(admissions: Admissions, me: Ed25519PrivateKey, without: bytes = b"") -> _Word:
    """A function that makes this node's signed words; ConfigurationError if it is no admin."""
    signer = me.public_key().public_bytes_raw()
    if not admissions.roster.is_admin(node_id_of(me.public_key())):
        raise ConfigurationError(
            "this machine is no admin of the cluster, so it can't admit or ban others. Run the "
            f"command on {_seniors(admissions)}, or make this machine an admin there: "
            f"potluck admit --admin {node_id_of(me.public_key())[:12]}"
        )
    first = admissions.next_number(without)

    def word(
        key: bytes,
        verdict: Verdict,
        offset: int,
        *,
        expires: int = 0,
        name: str = "",
        reason: str = "",
        delete_code: bool = False,
    ) -> Admission:
        record = Admission(
            cluster=admissions.founding.cluster,
            number=first + offset,
            signer=signer,
            at=int(time.time()),
            key=key,
            verdict=verdict,
            expires=expires,
            name=name,
            reason=reason,
            delete_code=delete_code,
        )
        return sign(record, me)

    return word


def _secret(
    admissions: Admissions,
    me: Ed25519PrivateKey,
    psk: bytes,
    *,
    without: bytes = b"",
    offset: int = 0,
) -> SecretChange:
    _speaker(admissions, me)
    record = SecretChange(
        cluster=admissions.founding.cluster,
        number=admissions.next_number(without) + offset,
        signer=me.public_key().public_bytes_raw(),
        at=int(time.time()),
        namespace=namespace_of(psk),
    )
    return sign(record, me)


def _seniors(admissions: Admissions) -> str:
    """The admins, for the text of an error."""
    admins = [e for e in admissions.roster.entries.values() if e.role in ("founder", "admin")]
    names = [f"{each.name} ({each.node[:12]})" if each.name else each.node[:12] for each in admins]
    return "an admin: " + ", ".join(names) + " (`potluck nodes` shows them)"
