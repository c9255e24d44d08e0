"""Which files look like keys and credentials, by name and by first bytes. Pure.

A file that is named here does not leave the machine unless it is named on purpose. Names of data,
code and public keys must pass: ``id_map.csv``, a module ``keys``, ``tokenizer.json``,
``id_rsa.pub``.
"""

from __future__ import annotations

import re

HEAD_BYTES = 64
"""How much of a file ``kind_of_key`` looks at."""

_BACKUP = re.compile(r"(~|\.(bak|backup|old|orig|save|copy|tmp))$")
_TEXT = r"(\.(txt|json|ya?ml|toml|ini|cfg|conf|env|xml|csv|db|pickle|pkl))?"
_WHOSE_TOKEN = (
    "access api auth bearer bot discord gh github gitlab hf huggingface npm oauth pypi refresh "
    "session slack wandb"
).replace(" ", "|")

_NAMES: tuple[tuple[str, str], ...] = (
    ("an SSH key", r"id_(rsa|dsa|ecdsa|ed25519|xmss)([._-](?!pub$).*)?|id_[^.]*"),
    ("an SSH host key", r"ssh_host_.*_key"),
    ("a key", r".*\.(pem|key|p8|ppk|agekey|keytab)"),
    ("a key store", r".*\.(p12|pfx|pkcs12|jks|jceks|keystore|kdbx?|ovpn)|wallet\.dat"),
    ("credentials", rf"(.*[._-])?credentials?([._-].*)?{_TEXT}"),
    ("credentials", r"[._](netrc|htpasswd|pgpass|dockercfg)|htpasswd|\.(npmrc|pypirc|my\.cnf)"),
    ("credentials", r"(.*[._-])?service[._-]?accounts?([._-].*)?(\.json|\.ya?ml)?"),
    ("credentials", r"(.*[._-])?kube[._-]?config(\.ya?ml)?"),
    ("a secret", rf"(client|app|api|user|db)[._-]?secrets?([._-].*)?{_TEXT}"),
    ("a secret", rf"\.?secrets?([._-](dev|local|prod|production|staging|test))?{_TEXT}"),
    ("a secret", rf"passwords?{_TEXT}|(.*[._-])?api[._-]?keys?{_TEXT}"),
    ("a token", rf"\.?token{_TEXT}|(.*[._-])?({_WHOSE_TOKEN})[._-]?tokens?{_TEXT}"),
    ("settings with secrets", r"\.env(\..*)?|\.envrc|.*\.env"),
    ("potluck's key", r"cluster_secret(\..*)?|node_keypair(\..*)?"),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _NAMES)

_CODE = re.compile(
    r"\.(py|pyi|pyx|ipynb|c|cc|cpp|cu|h|hpp|rs|go|java|kt|js|mjs|ts|tsx|jsx|rb|pl|r|jl|swift|cs|"
    r"sh|html?|css|md|rst|proto|sql)$"
)
"""``credentials.py`` is code that handles credentials."""

_HEADS = (
    ("a private key", re.compile(rb"\s*-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")),
    ("a private key", re.compile(rb"PuTTY-User-Key-File-|AGE-SECRET-KEY-")),
    ("a password store", re.compile(rb"\x03\xd9\xa2\x9a")),
)


def kind_of_name(name: str) -> str:
    """What a file of this ``name`` (without folders) most likely is, with its article; empty if
    there is nothing special about it."""
    plain = name.casefold()
    while (shorter := _BACKUP.sub("", plain)) != plain:
        plain = shorter
    if _CODE.search(plain):
        return ""
    return next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(plain)), "")


def kind_of_head(head: bytes) -> str:
    """The same by the first ``HEAD_BYTES`` of a file."""
    return next((kind for kind, pattern in _HEADS if pattern.match(head)), "")
