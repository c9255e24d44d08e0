"""One round of secure aggregation: four calls of each client, and the mean of their changes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from numpy.typing import NDArray

from potluck.federated.aggregation import Round
from potluck.federated.parameters import num_values
from potluck.federated.secure.client import SEALED_BYTES, SHARE_BYTES, as_words
from potluck.federated.secure.masking import NUM_EXTRA, Scale, Words
from potluck.federated.secure.server import MaskingServer, Opened
from potluck.federated.secure.settings import Range, SecureAggregation

Phase = Literal["before", "training", "after"]


class Ask(Protocol):
    """Calls the clients' method of a phase; returns the answers that arrived in time. ``enough``
    answers end the phase; None: as many as the round's patience asks for."""

    def __call__(
        self,
        phase: Phase,
        method: str,
        arguments: dict[str, dict[str, Any]],
        understand: Callable[[str, Any], Any],
        enough: int | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Summed:
    """The weighted mean ``change`` of the clients that ``arrived``, of ``began`` that sent keys,
    and the sum of their numbers of samples; ``saturation`` is the fraction of values that were cut
    off, ``num_heavy`` how many of the clients have more samples than counted. ``cheats``: clients
    that broke the protocol, which did no harm to this sum, and what each did."""

    change: NDArray[np.float64]
    num_samples: float
    arrived: tuple[str, ...]
    began: int
    saturation: float
    num_heavy: int
    cheats: Mapping[str, str]


def secure_sum(
    now: Round,
    asked: Mapping[str, Mapping[str, Any]],
    settings: SecureAggregation,
    present: Range,
    ask: Ask,
    clip: float | None,
) -> Summed:
    """Run one round with the clients in ``asked``, each with its config. TooFew if too few of them
    stay in one of its phases, Spoiled if the clients that made it fail are known, ValueError for
    another sum than one of changes."""
    session = secrets.token_bytes(16)
    keys = ask("before", "secure_keys", _to_all(asked, {"session": session}), _keys())
    threshold = settings.shares_needed(len(keys))
    server = MaskingServer(threshold, session)
    server.take_keys(keys)
    question = {"session": session, "keys": dict(keys), "threshold": threshold}
    server.take_shares(ask("before", "secure_shares", _to_all(keys, question), _shares(keys)))
    length = num_values(now.parameters) + NUM_EXTRA
    scale = Scale(present.limit, present.max_samples, len(server.sharing))
    train = {
        "session": session,
        "parameters": now.parameters,
        "limit": scale.limit,
        "max_samples": scale.max_samples,
        "num_clients": scale.num_clients,
        "clip": clip,
    }
    questions = {
        name: {**train, "config": dict(asked[name]), "sealed": server.shares_for(name)}
        for name in server.sharing
    }
    server.take_masked(ask("training", "secure_masked", questions, _words_of(length)))
    survivors = list(server.masked)
    unmask = {"session": session, "survivors": survivors}
    opened = ask(
        "after", "secure_unmask", _to_all(server.masked, unmask), _opened(server), threshold
    )
    found = scale.decode(server.total(opened), len(survivors))
    saturation = found.num_cut / (len(survivors) * (length - NUM_EXTRA))
    if clip is None:
        present.follow(saturation, found.num_high, found.num_heavy)
    arrived = tuple(survivors)
    return Summed(
        found.mean,
        found.num_samples,
        arrived,
        len(keys),
        saturation,
        found.num_heavy[0],
        server.cheats,
    )


def _to_all(clients: Mapping[str, Any], question: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(clients, question)


def _bytes(value: object, length: int) -> bytes:
    """A client's bytes. ``bytes(number)`` would take as much memory as the client says."""
    if not isinstance(value, bytes) or len(value) != length:
        raise ValueError(f"{length} bytes are needed")
    return value


def _keys() -> Callable[[str, Any], dict[str, bytes]]:
    """Checks the clients' public keys. Clients refuse a list with equal keys, or with a key that
    gives no shared secret; the check here also knows which client sent it."""
    seen: dict[bytes, str] = {}
    probe = X25519PrivateKey.generate()

    def understand(client: str, answer: Any) -> dict[str, bytes]:
        keys = {name: _bytes(answer["keys"][name], 32) for name in ("mask", "channel")}
        for key in keys.values():
            if key in seen:
                raise ValueError(f"its key is that of client {seen[key]}, too")
            try:
                probe.exchange(X25519PublicKey.from_public_bytes(key))
            except ValueError:
                raise ValueError("its key gives no shared secret") from None
            seen[key] = client
        return keys

    return understand


def _shares(clients: Mapping[str, Any]) -> Callable[[str, Any], dict[str, bytes]]:
    def understand(client: str, answer: Any) -> dict[str, bytes]:
        shares = {str(name): _bytes(s, SEALED_BYTES) for name, s in answer["shares"].items()}
        if shares.keys() != clients.keys():
            raise ValueError("its shares are not for the clients that take part")
        return shares

    return understand


def _words_of(length: int) -> Callable[[str, Any], Words]:
    def understand(client: str, answer: Any) -> Words:
        words = as_words(answer["words"])
        if len(words) != length:
            raise ValueError(f"{len(words)} words, not {length}")
        return words

    return understand


def _opened(server: MaskingServer) -> Callable[[str, Any], Opened]:
    def understand(client: str, answer: Any) -> Opened:
        found = dict(answer)
        for kind in found.keys() & {"seeds", "keys"}:
            shares = found[kind].items()
            found[kind] = {str(name): _bytes(share, SHARE_BYTES) for name, share in shares}
        return server.checked(client, found)

    return understand
