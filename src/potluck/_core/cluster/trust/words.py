"""Words for people: to compare, and as passphrases."""

from __future__ import annotations

import functools
import secrets

NUM_WORDS = 6


@functools.cache
def word_list() -> tuple[str, ...]:
    """2,048 short English words, no two with the same first four letters (the list of BIP 39)."""
    from mnemonic import Mnemonic

    return tuple(Mnemonic("english").wordlist)


def new_passphrase() -> str:
    """Six random words: 66 bits."""
    return " ".join(secrets.choice(word_list()) for _ in range(NUM_WORDS))
