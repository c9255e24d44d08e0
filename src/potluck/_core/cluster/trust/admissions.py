"""The meaning of a cluster's signed records: which keys are admitted, and in which role. Pure.

The result depends on the set of records alone, not on the order in which they arrived:

- The founding key is an admin for good, unless the founder has said that a key made of recovery
  codes is senior to its own. Then that key is the root of the tree, and the founder an admin by its
  word, until it says another. An admin may say a word about any other key: that it is an admin, a
  member, or revoked.
- Of all words about a key the word with the highest number holds; of two with the same number, a
  revocation.
- Whether a key is an admin is decided by the words of its *seniors* alone: of the admins that are
  nearer to the root of the tree of admissions, or as near and admitted earlier. So two
  admins can't both revoke each other, and a stolen machine can't revoke the founder.
- The words of an admin count from its own admission on. A key that is no admin (any more) has no
  word: all that it ever signed is void, whatever dates and numbers are in it.
- ``SecretChange``: of the records of all admins the highest number holds.
- A number is at most ``limit`` of its signer: the highest of the root's, and ``MAX_AHEAD`` for
  each place of seniority from the end. A record beyond it has no force until the root's numbers
  have come near. So an admin that jumps ahead can't use up the numbers: each of its seniors has
  ``MAX_AHEAD`` numbers above all of its own. (Records that jump can't be refused when they arrive:
  two nodes that heard the numbers between in another order would keep different lists.)
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.wire.admissions import (
    MAX_NUMBER,
    MAX_RECORDS,
    Admission,
    Founding,
    Record,
    Recovery,
    SecretChange,
)
from potluck.errors import IdentityError, SecurityError

MAX_ADMINS = 64
MAX_WAITING = 256
MAX_AHEAD = 1 << 20
"""More words than the admins of a cluster say while its founder says none."""
MAX_OF_SIGNER = MAX_RECORDS // 4
"""An admin that fills the list leaves room for the word that bans it."""

_Place = tuple[bytes, bytes]
_LOWEST = (0, False, b"")


@dataclass(frozen=True, slots=True)
class Entry:
    """What the cluster says about one key. ``word`` is None for the root, and for a founder of
    which no word was said."""

    key: bytes
    role: str
    """``founder``, ``admin``, ``member`` or ``revoked``."""
    word: Admission | None = None

    @property
    def node(self) -> str:
        """The node id of the key."""
        return node_id_of_bytes(self.key)

    @property
    def name(self) -> str:
        """What the machine called itself when it was admitted; empty if that is not known."""
        return self.word.name if self.word is not None else ""

    def has_ended(self, now: float) -> bool:
        """Whether the admission had an end, which is over at Unix time ``now``."""
        return bool(self.expires) and now >= self.expires

    @property
    def expires(self) -> int:
        """The Unix time at which the admission ends; 0: never."""
        return self.word.expires if self.word is not None and self.role == "member" else 0


@dataclass(frozen=True, slots=True)
class Roster:
    """What a set of records says: an entry for each key, by node id; the namespace of the secret
    that the cluster has changed to (empty: it never has); the Unix time of the newest signature of
    an admin; the highest number in force; for each admin's key, the most senior first, the highest
    number that it may give."""

    entries: dict[str, Entry] = field(default_factory=dict)
    namespace: str = ""
    at: int = 0
    number: int = 0
    limits: dict[bytes, int] = field(default_factory=dict)

    def is_admin(self, node: str) -> bool:
        """Whether ``node`` may admit and revoke."""
        entry = self.entries.get(node)
        return entry is not None and entry.role in ("founder", "admin")

    def is_admitted(self, node: str, now: float) -> bool:
        """Whether ``node`` is in the cluster at Unix time ``now``."""
        entry = self.entries.get(node)
        if entry is None or entry.role == "revoked":
            return False
        return not entry.has_ended(now)


class Admissions:
    """The records of one cluster: a set that only grows, in which an admin's newer word about a key
    replaces its older word."""

    def __init__(
        self, founding: Founding, records: Iterable[Record] = (), *, is_trusted: bool = False
    ) -> None:
        """SecurityError if a record or the founding is not genuine, or of another cluster; those
        that are ``is_trusted`` are not checked again."""
        if not is_trusted:
            _check_recovery(founding)
        self.founding = founding
        self.records: tuple[Record, ...] = ()
        """In the order of their numbers, so that whoever has the first of them knows everything
        that their signers knew."""
        self.fingerprints: tuple[bytes, ...] = ()
        """Those of ``records``, in the same order."""
        self.digest = _digest(founding, ())
        """Eight bytes, equal for equal sets of records."""
        self.roster = evaluate(founding, ())
        self._kept: dict[_Place, Record] = {}
        self._waiting: dict[_Place, Record] = {}
        if is_trusted:
            self._take({_place(each): each for each in records})
        else:
            self.add(records)

    def add(self, records: Iterable[Record]) -> tuple[Record, ...]:
        """Take ``records``; those that are new and of an admin.

        A record of a key that is no admin waits (in memory, at most ``MAX_WAITING``) for that key's
        admission. SecurityError for a forged record and one of another cluster, IdentityError for
        records beyond ``MAX_RECORDS``; then none of ``records`` is taken.
        """
        new: dict[_Place, Record] = {}
        for record in records:
            place = _place(record)
            known = new.get(place) or self._kept.get(place) or self._waiting.get(place)
            if known is not None and _rank(record) <= _rank(known):
                continue
            if record.cluster != self.founding.cluster:
                raise SecurityError("a record of admission of another cluster")
            if not is_genuine(record):
                raise SecurityError("a record of admission whose signature is wrong")
            new[place] = record
        return self._take(new) if new else ()

    def copy(self) -> Admissions:
        """The same list, to be changed apart from this one."""
        return Admissions(self.founding, self.records, is_trusted=True)

    def set_recovery(self, recovery: Recovery) -> bool:
        """Take the founder's word who is senior to it; False if it is known. The first that comes
        counts for good: what a thief of the founder's key signs after it is refused, whatever
        number it has. SecurityError for another than the known one, and for a forged one."""
        changed = msgspec.structs.replace(self.founding, recovery=recovery)
        if self.founding.recovery is not None:
            if changed.recovery_bytes == self.founding.recovery_bytes:
                return False
            raise SecurityError(
                "it has other recovery codes for this cluster than this machine. Codes count once: "
                "on the machines whose codes you don't have run `potluck join --replace`, with "
                "`potluck pair` on one of the others"
            )
        _check_recovery(changed)
        self.founding = changed
        self._take({})
        return True

    def missing(self, known: Iterable[bytes]) -> tuple[Record, ...]:
        """The records whose fingerprints are not among ``known``, in the order of their numbers."""
        seen = set(known)
        pairs = zip(self.records, self.fingerprints, strict=True)
        return tuple(each for each, fingerprint in pairs if fingerprint not in seen)

    def _take(self, new: dict[_Place, Record]) -> tuple[Record, ...]:
        """Keep records of admins, of those that are revoked too, and let the others wait."""
        every = {**self._kept, **self._waiting, **new}
        signers = _named_admins(self.founding, every.values())
        kept = {place: each for place, each in every.items() if each.signer in signers}
        most = max(Counter(each.signer for each in kept.values()).values(), default=0)
        if len(kept) > MAX_RECORDS or most > MAX_OF_SIGNER:
            raise IdentityError(
                f"the list of admitted keys is full: it has at most {MAX_RECORDS} records, "
                f"{MAX_OF_SIGNER} of one admin. Ban the admin that filled it, if one did "
                "(`potluck nodes`), or found a new cluster"
            )
        before = self._kept
        waiting = [item for item in every.items() if item[1].signer not in signers]
        self._waiting = dict(waiting[-MAX_WAITING:])
        self._kept = kept
        self.records = tuple(sorted(kept.values(), key=lambda each: (each.number, each.signature)))
        self.fingerprints = tuple(each.fingerprint for each in self.records)
        self.digest = _digest(self.founding, self.fingerprints)
        self.roster = evaluate(self.founding, self.records)
        return tuple(each for each in self.records if before.get(_place(each)) != each)


def evaluate(founding: Founding, records: Sequence[Record]) -> Roster:
    """What ``records`` (genuine, one word for each signer and key) say."""
    by_signer: dict[bytes, list[Record]] = {}
    for record in records:
        by_signer.setdefault(record.signer, []).append(record)
    words: dict[bytes, list[Admission]] = {}
    changes: list[SecretChange] = []
    root, at = founding.root, 0
    base = number = founding.recovery.number if founding.recovery else 0
    base = max((each.number for each in by_signer.get(root, ())), default=base)
    admins: dict[bytes, Admission | None] = {}
    limits: dict[bytes, int] = {}
    # An admin waits here with its place in the tree of admissions; seniors come first.
    path: tuple[tuple[int, bytes], ...] = ()
    waiting = [(0, path, root), (1, ((0, founding.key),), founding.key)]
    while waiting:
        depth, path, key = heapq.heappop(waiting)
        if key in admins or len(admins) >= MAX_ADMINS:
            continue
        own = _winner(words.get(key, ()))
        is_implied = own is None and key in (root, founding.key)
        if not is_implied and (own is None or own.verdict != "admin"):
            continue
        ahead = MAX_AHEAD * (MAX_ADMINS - len(admins))
        limits[key] = base + ahead if admins else MAX_NUMBER
        admins[key] = own
        since = 0 if own is None else own.number
        for record in by_signer.get(key, ()):
            if not since < record.number <= limits[key]:
                continue
            at, number = max(at, record.at), max(number, record.number)
            if isinstance(record, SecretChange):
                changes.append(record)
            elif record.key not in (key, root):
                words.setdefault(record.key, []).append(record)
                if record.verdict == "admin":
                    place = (*path, (record.number, record.key))
                    heapq.heappush(waiting, (depth + 1, place, record.key))
    entries = {key: Entry(key, "admin", word) for key, word in admins.items()}
    entries[root] = Entry(root, "founder")
    for key, said in words.items():
        word = _winner(said)
        if key not in admins and word is not None:
            role = "member" if word.verdict == "admin" else word.verdict
            entries[key] = Entry(key, role, word)
    last = max(changes, key=_rank, default=None)
    namespace = "" if last is None else last.namespace
    by_node = {each.node: each for each in entries.values()}
    return Roster(by_node, namespace, at, number, limits)


def new_founding(key: Ed25519PrivateKey) -> Founding:
    """The founding of a new cluster by ``key``."""
    return Founding(key.public_key().public_bytes_raw(), secrets.token_bytes(16))


R = TypeVar("R", Admission, SecretChange)


def sign(record: R, key: Ed25519PrivateKey) -> R:
    """``record`` with the signature of ``key``, which must be its signer's."""
    assert key.public_key().public_bytes_raw() == record.signer, "signed with another key"
    return msgspec.structs.replace(record, signature=key.sign(record.signed_bytes))


def is_genuine(record: Record) -> bool:
    """Whether the signature is the signer's. Takes about 0.1 ms."""
    return _is_signed(record.signer, record.signature, record.signed_bytes)


def _is_signed(key: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def now_of(clock: float, roster: Roster) -> float:
    """The Unix time for judging what has expired: this machine's clock, or an admin's newest
    signature if the clock is behind it. So a machine whose clock is years behind does not accept
    what had expired when the cluster last said something."""
    return max(clock, roster.at)


def _check_recovery(founding: Founding) -> None:
    recovery = founding.recovery
    if recovery is not None and not _is_signed(
        founding.key, recovery.signature, founding.recovery_bytes
    ):
        raise SecurityError("recovery codes whose signature is not the founder's")


def _named_admins(founding: Founding, records: Iterable[Record]) -> set[bytes]:
    """The root, the founder, and all keys that such a key called an admin. Their records are kept
    also while another admin's word revokes them, so that the order of arrival does not matter: that
    word may lose its force. The root's can't, so keys that are no admins by it are left out, and an
    admin that filled the list, with second keys as well, leaves it with the root's word."""
    words = [each for each in records if isinstance(each, Admission)]
    final = {
        each.key: _rank(each)
        for each in words
        if each.signer == founding.root and each.verdict != "admin"
    }
    named: dict[bytes, list[bytes]] = {}
    for each in words:
        if each.verdict == "admin" and _rank(each) > final.get(each.key, _LOWEST):
            named.setdefault(each.signer, []).append(each.key)
    new = [founding.root] + [founding.key] * (founding.key not in final)
    found = set(new)
    while new:
        for key in named.get(new.pop(), ()):
            if key not in found:
                found.add(key)
                new.append(key)
    return found


def _digest(founding: Founding, fingerprints: Iterable[bytes]) -> bytes:
    start = founding.cluster + founding.recovery_bytes
    digest = hashlib.sha3_256(start + b"".join(sorted(fingerprints)))
    return digest.digest()[:8]


def _winner(words: Iterable[Admission]) -> Admission | None:
    return max(words, key=_rank, default=None)


def _rank(record: Record) -> tuple[int, bool, bytes]:
    is_revocation = isinstance(record, Admission) and record.verdict == "revoked"
    return (record.number, is_revocation, record.signature)


def _place(record: Record) -> _Place:
    """The signer and the key in question (empty for a change of the secret)."""
    return (record.signer, record.key if isinstance(record, Admission) else b"")
