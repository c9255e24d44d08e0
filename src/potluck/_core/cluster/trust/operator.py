"""What people order about the cluster's list of admitted keys: admit, ban, lock, change the secret.

Each order is signed with this node's key, which must be an admin's, and written to this node's
file. The agent passes it on; without a running agent the other machines learn of it when
``potluck up`` runs here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.admissions import (
    Admissions,
    Entry,
    new_founding,
    now_of,
    sign,
)
from potluck._core.transport.credentials import namespace_of, node_id_of, node_id_of_bytes
from potluck._core.wire.admissions import (
    Admission,
    Record,
    SecretChange,
    Verdict,
)
from potluck.errors import ConfigurationError, IdentityError

DAY_S = 86_400
MAX_KEPT = 256
"""Of the machines that a banned admin had admitted. One that filled the list can still be banned:
the records of the one who bans it have a bound, too (``admissions.MAX_OF_SIGNER``)."""


@dataclass(frozen=True, slots=True)
class Ban:
    """What a ban changes for others. ``kept`` are machines that the banned one had admitted, and
    stay in as members; ``still_out`` those that it had banned, and stay out; ``lost`` is the number
    of machines that it had admitted beyond ``MAX_KEPT``: they are out."""

    kept: tuple[str, ...] = ()
    still_out: tuple[str, ...] = ()
    lost: int = 0


def admit(
    file: AdmissionFile,
    me: Ed25519PrivateKey,
    key: bytes,
    *,
    name: str = "",
    verdict: Verdict = "member",
    days: float = 0.0,
) -> None:
    """Admit ``key`` (32 bytes) as ``verdict``, for ``days`` (0: without end). What an admin said
    that is no admin any more stays as after a ban (``revoke``). ConfigurationError if this node
    may not change the role of ``key``."""
    if verdict == "admin" and days:
        raise ConfigurationError("the admission of an admin can't end: leave --days out")
    node = node_id_of_bytes(key)

    def make(admissions: Admissions) -> Sequence[Record]:
        pen = _Pen(admissions, me)
        if verdict == "admin" and admissions.roster.is_admin(node):
            return ()  # a newer word would void what it has said until now
        if key == me.public_key().public_bytes_raw():
            raise ConfigurationError("a machine can't change its own role; run it on another admin")
        expires = int(time.time() + days * DAY_S) if days else 0
        records: list[Record] = [pen.word(key, verdict, expires=expires, name=name[:64])]
        _keep(admissions, key, pen, records)
        return records

    def before(changed: Admissions) -> None:
        if changed.roster.entries[node].role != verdict:
            raise ConfigurationError(_is_senior(changed, node))

    file.change(make, before)


def revoke(
    file: AdmissionFile,
    me: Ed25519PrivateKey,
    node: str,
    reason: str = "",
    *,
    psk: bytes | None,
    store: Callable[[bytes], None] = lambda psk: None,
    delete_code: bool = False,
    heir: tuple[bytes, str] | None = None,
) -> Ban:
    """Ban ``node``. All that it ever said is void, so this node says anew what is to stay: machines
    that it had admitted are in as members, also those that were admins by its word alone; machines
    that it had banned are out. Nobody gains a role by a ban.

    ``psk`` is the cluster's next secret, which ``store`` stores, None if it can't be changed
    here. With ``heir`` (a key and a name) ``me`` is the key of the recovery codes: the
    heir becomes an admin by the same change, whatever the list said about it, and what the banned
    one had banned stays listed, so that it can be admitted again. ConfigurationError if this node
    may not ban that one.
    """
    done = Ban()

    def make(admissions: Admissions) -> Sequence[Record]:
        nonlocal done
        entry = admissions.roster.entries.get(node)
        if entry is None:
            raise ConfigurationError(
                f"node {node[:12]} is not on the list of admitted keys: it is not in the cluster, "
                "and no machine talks to it. `potluck nodes` shows the list"
            )
        if entry.role == "founder":
            raise ConfigurationError(
                f"node {node[:12]} founded the cluster and can't be banned: there are no recovery "
                "codes. If it was stolen, found a new cluster: remove ~/.potluck on a machine that "
                "you trust, run `potluck init --recovery-codes 3` there, and pair anew"
            )
        if entry.key in (me.public_key().public_bytes_raw(), heir and heir[0]):
            raise ConfigurationError("a machine can't ban itself; run the command on another one")
        pen = _Pen(admissions, me)
        word = pen.word(
            entry.key, "revoked", name=entry.name, reason=reason[:200], delete_code=delete_code
        )
        records: list[Record] = [word]
        if heir is not None and not _is_admin_by_root(admissions, heir[0]):
            records.append(pen.word(heir[0], "admin", name=heir[1][:64]))
        done = _keep(admissions, entry.key, pen, records, heir and heir[0])
        if psk is not None:
            records.append(pen.secret(psk))
        return records

    def before(changed: Admissions) -> None:
        if changed.roster.entries[node].role != "revoked":
            codes = f"; or with recovery codes: potluck ban {node[:12]} --codes"
            raise ConfigurationError(
                _is_senior(changed, node) + (codes if changed.founding.codes_needed else "")
            )
        if psk is not None:
            store(psk)

    file.change(make, before)
    return done


def _keep(
    admissions: Admissions,
    key: bytes,
    pen: _Pen,
    records: list[Record],
    heir: bytes | None = None,
) -> Ban:
    """Add to ``records``, which void words, the words by which nobody but ``key`` and ``heir`` gets
    in, out, or a higher role; with an heir also all bans, at most ``MAX_KEPT``."""
    changed = admissions.copy()
    changed.add(records)
    after = changed.roster.entries
    kept: list[Entry] = []
    out: list[Entry] = []
    unlisted: list[Entry] = []
    for node, entry in admissions.roster.entries.items():
        left = after.get(node)
        if entry.key in (key, heir) or entry.word is None or (left and left.role == entry.role):
            continue
        if entry.role != "revoked":
            kept.append(entry)
        elif left is not None:  # it would come back by another admin's older word
            out.append(entry)
        elif heir is not None and len(unlisted) < MAX_KEPT:
            unlisted.append(entry)
    kept.sort(key=_number)
    out += unlisted
    for entry in out:
        records.append(pen.word(entry.key, "revoked", name=entry.name, reason=_reason(entry)))
    for entry in kept[:MAX_KEPT]:
        records.append(pen.word(entry.key, "member", expires=entry.expires, name=entry.name))
    return Ban(
        tuple(each.node for each in kept[:MAX_KEPT]),
        tuple(each.node for each in out),
        len(kept[MAX_KEPT:]),
    )


def _is_admin_by_root(admissions: Admissions, key: bytes) -> bool:
    """Whether nobody but the root can change that."""
    entry = admissions.roster.entries.get(node_id_of_bytes(key))
    if entry is None or entry.role != "admin":
        return False
    return entry.word is None or entry.word.signer == admissions.founding.root


def _is_senior(admissions: Admissions, node: str) -> str:
    """The text of the error for an order about an admin that is senior to this machine."""
    return (
        f"node {node[:12]} is an admin that is senior to this machine: run the command on "
        f"{_seniors(admissions)}"
    )


def _number(entry: Entry) -> int:
    return 0 if entry.word is None else entry.word.number


def _reason(entry: Entry) -> str:
    return "" if entry.word is None else entry.word.reason


def change_of_secret(
    file: AdmissionFile,
    me: Ed25519PrivateKey,
    psk: bytes,
    store: Callable[[bytes], None] = lambda psk: None,
) -> None:
    """Make ``psk`` the cluster's secret from now on; ``store`` stores it here."""
    file.change(lambda admissions: [_Pen(admissions, me).secret(psk)], lambda changed: store(psk))


def lock(file: AdmissionFile, me: Ed25519PrivateKey, others: Collection[tuple[bytes, str]]) -> None:
    """Close an open cluster: this node is its founder, and ``others`` (keys and names) its
    members. IdentityError if it is closed already."""
    founding = new_founding(me)
    pen = _Pen(Admissions(founding), me)
    file.create(founding, [pen.word(key, "member", name=name[:64]) for key, name in others])


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
        pen = _Pen(admissions, me)
        ended = over(admissions)
        return [pen.word(each.key, "revoked", reason="its admission has ended") for each in ended]

    if over(admissions):
        file.change(make)  # where an admission that was renewed meanwhile counts


def new_secret() -> bytes:
    """A random secret, 32 bytes."""
    return secrets.token_bytes(32)


class _Pen:
    """Writes this node's signed records for ``admissions``, one number after the other.
    ConfigurationError if it is no admin."""

    def __init__(self, admissions: Admissions, me: Ed25519PrivateKey) -> None:
        if not admissions.roster.is_admin(node_id_of(me.public_key())):
            raise ConfigurationError(
                "this machine is no admin of the cluster, so it can't admit or ban others. Run the "
                f"command on {_seniors(admissions)}, or make this machine an admin there: "
                f"potluck admit --admin {node_id_of(me.public_key())[:12]}"
            )
        roster = admissions.roster
        self._me = me
        self._signer = me.public_key().public_bytes_raw()
        self._cluster = admissions.founding.cluster
        self._number = roster.number
        self._limit = roster.limits[self._signer]

    def word(
        self,
        key: bytes,
        verdict: Verdict,
        *,
        expires: int = 0,
        name: str = "",
        reason: str = "",
        delete_code: bool = False,
    ) -> Admission:
        """This node's word about ``key``."""
        record = Admission(
            cluster=self._cluster,
            number=self._next(),
            signer=self._signer,
            at=int(time.time()),
            key=key,
            verdict=verdict,
            expires=expires,
            name=name,
            reason=reason,
            delete_code=delete_code,
        )
        return sign(record, self._me)

    def secret(self, psk: bytes) -> SecretChange:
        """This node's word that ``psk`` is the secret."""
        record = SecretChange(
            cluster=self._cluster,
            number=self._next(),
            signer=self._signer,
            at=int(time.time()),
            namespace=namespace_of(psk),
        )
        return sign(record, self._me)

    def _next(self) -> int:
        if self._number >= self._limit:
            raise IdentityError(
                "a senior admin has used up the numbers that this machine may give to its records. "
                "Run the command on the founder of the cluster (`potluck nodes`), or run `potluck "
                "rotate` there first; or have it ban that admin (where there are recovery codes: "
                "`potluck ban NODE --codes`)"
            )
        self._number += 1
        return self._number


def _seniors(admissions: Admissions) -> str:
    """The admins, for the text of an error."""
    is_machine = not admissions.founding.codes_needed
    roles = ("founder", "admin") if is_machine else ("admin",)
    admins = [each for each in admissions.roster.entries.values() if each.role in roles]
    names = [f"{each.name} ({each.node[:12]})" if each.name else each.node[:12] for each in admins]
    return "an admin: " + ", ".join(names) + " (`potluck nodes` shows them)"
