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

Recovery codes are a key that is senior to the founder, cut into codes for people to keep. The
founder signs once that this key is senior to its own, and nobody keeps the key: more than half
of the codes make it again (Shamir's secret sharing), fewer say nothing about it. So a stolen
founder is banned like any other admin, by the word of a key that the thief has never had, and no
word of the thief's changes who holds a code. For a cluster's machines the first such word counts
for good: which of two was first no set of signed records can tell (a thief dates its own back), so
each machine keeps the one that it heard first.
"""

from __future__ import annotations

import base64
import binascii
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

from potluck._core.shamir import SECRET_BYTES, SHORT, join, split
from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.wire import admissions as wire
from potluck.errors import ConfigurationError, IdentityError, SecurityError

MAX_ADMINS = 64
MAX_WAITING = 256
MAX_AHEAD = 1 << 20
"""More words than the admins of a cluster say while its founder says none."""
MAX_OF_SIGNER = wire.MAX_RECORDS // 4
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
    word: wire.Admission | None = None

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
        self,
        founding: wire.Founding,
        records: Iterable[wire.Record] = (),
        *,
        is_trusted: bool = False,
    ) -> None:
        """SecurityError if a record or the founding is not genuine, or of another cluster; those
        that are ``is_trusted`` are not checked again."""
        if not is_trusted:
            _check_recovery(founding)
        self.founding = founding
        self.records: tuple[wire.Record, ...] = ()
        """In the order of their numbers, so that whoever has the first of them knows everything
        that their signers knew."""
        self.fingerprints: tuple[bytes, ...] = ()
        """Those of ``records``, in the same order."""
        self.digest = _digest(founding, ())
        """Eight bytes, equal for equal sets of records."""
        self.roster = evaluate(founding, ())
        self._kept: dict[_Place, wire.Record] = {}
        self._waiting: dict[_Place, wire.Record] = {}
        if is_trusted:
            self._take({_place(each): each for each in records})
        else:
            self.add(records)

    def add(self, records: Iterable[wire.Record]) -> tuple[wire.Record, ...]:
        """Take ``records``; those that are new and of an admin.

        A record of a key that is no admin waits (in memory, at most ``MAX_WAITING``) for that key's
        admission. SecurityError for a forged record and one of another cluster, IdentityError for
        records beyond ``MAX_RECORDS``; then none of ``records`` is taken.
        """
        new: dict[_Place, wire.Record] = {}
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

    def set_recovery(self, recovery: wire.Recovery) -> bool:
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

    def missing(self, known: Iterable[bytes]) -> tuple[wire.Record, ...]:
        """The records whose fingerprints are not among ``known``, in the order of their numbers."""
        seen = set(known)
        pairs = zip(self.records, self.fingerprints, strict=True)
        return tuple(each for each, fingerprint in pairs if fingerprint not in seen)

    def _take(self, new: dict[_Place, wire.Record]) -> tuple[wire.Record, ...]:
        """Keep records of admins, of those that are revoked too, and let the others wait."""
        every = {**self._kept, **self._waiting, **new}
        signers = _named_admins(self.founding, every.values())
        kept = {place: each for place, each in every.items() if each.signer in signers}
        most = max(Counter(each.signer for each in kept.values()).values(), default=0)
        if len(kept) > wire.MAX_RECORDS or most > MAX_OF_SIGNER:
            raise IdentityError(
                f"the list of admitted keys is full: it has at most {wire.MAX_RECORDS} records, "
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


def evaluate(founding: wire.Founding, records: Sequence[wire.Record]) -> Roster:
    """What ``records`` (genuine, one word for each signer and key) say."""
    by_signer: dict[bytes, list[wire.Record]] = {}
    for record in records:
        by_signer.setdefault(record.signer, []).append(record)
    words: dict[bytes, list[wire.Admission]] = {}
    changes: list[wire.SecretChange] = []
    root, at = founding.root, 0
    base = number = founding.recovery.number if founding.recovery else 0
    base = max((each.number for each in by_signer.get(root, ())), default=base)
    admins: dict[bytes, wire.Admission | None] = {}
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
        limits[key] = base + ahead if admins else wire.MAX_NUMBER
        admins[key] = own
        since = 0 if own is None else own.number
        for record in by_signer.get(key, ()):
            if not since < record.number <= limits[key]:
                continue
            at, number = max(at, record.at), max(number, record.number)
            if isinstance(record, wire.SecretChange):
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


def new_founding(key: Ed25519PrivateKey) -> wire.Founding:
    """The founding of a new cluster by ``key``."""
    return wire.Founding(key.public_key().public_bytes_raw(), secrets.token_bytes(16))


R = TypeVar("R", wire.Admission, wire.SecretChange)


def sign(record: R, key: Ed25519PrivateKey) -> R:
    """``record`` with the signature of ``key``, which must be its signer's."""
    assert key.public_key().public_bytes_raw() == record.signer, "signed with another key"
    return msgspec.structs.replace(record, signature=key.sign(record.signed_bytes))


def is_genuine(record: wire.Record) -> bool:
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


def _check_recovery(founding: wire.Founding) -> None:
    recovery = founding.recovery
    if recovery is not None and not _is_signed(
        founding.key, recovery.signature, founding.recovery_bytes
    ):
        raise SecurityError("recovery codes whose signature is not the founder's")


def _named_admins(founding: wire.Founding, records: Iterable[wire.Record]) -> set[bytes]:
    """The root, the founder, and all keys that such a key called an admin. Their records are kept
    also while another admin's word revokes them, so that the order of arrival does not matter: that
    word may lose its force. The root's can't, so keys that are no admins by it are left out, and an
    admin that filled the list, with second keys as well, leaves it with the root's word."""
    words = [each for each in records if isinstance(each, wire.Admission)]
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


def _digest(founding: wire.Founding, fingerprints: Iterable[bytes]) -> bytes:
    start = founding.cluster + founding.recovery_bytes
    digest = hashlib.sha3_256(start + b"".join(sorted(fingerprints)))
    return digest.digest()[:8]


def _winner(words: Iterable[wire.Admission]) -> wire.Admission | None:
    return max(words, key=_rank, default=None)


def _rank(record: wire.Record) -> tuple[int, bool, bytes]:
    is_revocation = isinstance(record, wire.Admission) and record.verdict == "revoked"
    return (record.number, is_revocation, record.signature)


def _place(record: wire.Record) -> _Place:
    """The signer and the key in question (empty for a change of the secret)."""
    return (record.signer, record.key if isinstance(record, wire.Admission) else b"")


_CHECK = 7
_LABEL = b"potluck recovery code v1"
_GROUP = 4


@dataclass(frozen=True, slots=True)
class Code:
    """One share of the key: the polynomial's value at ``at`` (1 to ``MAX_CODES``), 32 bytes."""

    at: int
    share: bytes = field(repr=False)

    def spoken(self, key: bytes) -> str:
        """The code as people write it down: 64 letters and digits in groups. Secret."""
        raw = bytes([self.at]) + self.share + _check(key, self.at, self.share)
        text = base64.b32encode(raw).decode().lower()
        return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def make_codes(
    admissions: Admissions, founder: Ed25519PrivateKey, count: int
) -> tuple[wire.Recovery, list[str]]:
    """``count`` codes for the cluster of ``admissions``, and the founder's word about their key.
    ConfigurationError unless 1 <= ``count`` <= ``MAX_CODES`` and ``founder`` founded the cluster,
    which has no codes."""
    founding = admissions.founding
    if not 1 <= count <= wire.MAX_CODES:
        raise ConfigurationError(f"{count} recovery codes: make 1 to {wire.MAX_CODES}; 3 are usual")
    if founding.codes_needed:
        raise ConfigurationError(
            f"this cluster has recovery codes already, of which {founding.codes_needed} are "
            "needed. They are made once: nothing but the codes can replace them. If they are "
            "lost, found a new cluster: remove ~/.potluck on a machine that you trust, run "
            "`potluck init --recovery-codes 3` there, and pair anew"
        )
    if founder.public_key().public_bytes_raw() != founding.key:
        raise ConfigurationError(
            "only the machine that founded the cluster makes recovery codes: run the command on "
            f"node {node_id_of_bytes(founding.key)[:12]} (`potluck nodes`)"
        )
    seed = secrets.token_bytes(SECRET_BYTES)
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    needed = count // 2 + 1
    recovery = wire.Recovery(key, needed, admissions.roster.number + 1)
    changed = msgspec.structs.replace(founding, recovery=recovery)
    signature = founder.sign(changed.recovery_bytes)
    shares = split(seed, range(1, count + 1), needed, SHORT)
    return (
        msgspec.structs.replace(recovery, signature=signature),
        [Code(at, share).spoken(key) for at, share in shares.items()],
    )


def parse_code(text: str, founding: wire.Founding) -> Code:
    """The code in a typed text, with any blanks and dashes; ConfigurationError if it is none of
    the cluster of ``founding``."""
    letters = "".join(each for each in text if each not in " -\u2013\u2014.\t").upper()
    try:
        raw = base64.b32decode(letters)
    except (binascii.Error, ValueError):
        raw = b""
    at, share, check = raw[:1], raw[1 : 1 + SECRET_BYTES], raw[1 + SECRET_BYTES :]
    is_whole = len(raw) == 1 + SECRET_BYTES + _CHECK and 1 <= raw[0] <= wire.MAX_CODES
    if not is_whole or check != _check(founding.root, at[0], share):
        raise ConfigurationError(
            "this is no recovery code of this cluster. A code has 64 letters and digits (a to z, "
            "2 to 7), as `potluck init --recovery-codes` showed it: look for a mistyped one"
        )
    return Code(at[0], share)


def recovery_key(codes: Sequence[Code], founding: wire.Founding) -> Ed25519PrivateKey:
    """The key that ``codes`` make. ConfigurationError if they are too few."""
    shares = {each.at: each.share for each in codes}
    if len(shares) < founding.codes_needed:
        raise ConfigurationError(
            f"{founding.codes_needed} different recovery codes are needed, and {len(shares)} given"
        )
    key = Ed25519PrivateKey.from_private_bytes(join(shares, SHORT))
    if key.public_key().public_bytes_raw() != founding.root:
        raise ConfigurationError("these recovery codes do not make the key of this cluster's codes")
    return key


def _check(key: bytes, at: int, share: bytes) -> bytes:
    return hashlib.sha3_256(_LABEL + key + bytes([at]) + share).digest()[:_CHECK]
