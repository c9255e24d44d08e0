"""Which files look like keys and credentials, by name and by content. Pure.

A file that is named here does not leave the machine unless it is named on purpose. Names of data,
code and public keys must pass: ``id_map.csv``, a module ``keys``, ``tokenizer.json``,
``id_rsa.pub``.
"""

from __future__ import annotations

import re

HEAD_BYTES = 16 << 10
"""How much of a file ``kind_of_head`` looks at: JSON files with keys are no larger."""

_BACKUP = re.compile(r"(~|\.(bak|backup|old|orig|save|copy|tmp))$")
_TEXT = r"(\.(txt|json|ya?ml|toml|ini|cfg|conf|env|xml|csv|db|pickle|pkl))?"
_CLOUDS = "gcp|gcs|gcloud|google|aws|azure|firebase|vertex|bigquery|cloud"
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
    ("credentials", r"[._]?(netrc|htpasswd|pgpass|dockercfg)|\.(npmrc|pypirc)|\.?my\.cnf"),
    ("credentials", r"pgpass\.conf|\.?s3cfg|\.?boto|\.?rclone\.conf|\.?dockerconfigjson"),
    ("a cloud key", rf"(({_CLOUDS})[._-])*(key|sa|sa[._-]?key|({_CLOUDS})[._-]?keys?)\.json"),
    ("a cloud key", r".*firebase[._-]?adminsdk.*\.json"),
    ("credentials in a Terraform state", r".*\.(tfstate|tfvars)(\.json)?|.*\.tfstate\..*"),
    ("cookies of a browser", r"(.*[._-])?cookies?\.(txt|json|sqlite)"),
    ("credentials", r"(.*[._-])?service[._-]?accounts?([._-].*)?(\.json|\.ya?ml)?"),
    ("credentials", r"(.*[._-])?kube[._-]?config(\.ya?ml)?"),
    ("a secret", rf"(client|app|api|user|db|streamlit)[._-]?secrets?([._-].*)?{_TEXT}"),
    ("a secret", r".*[._-]secrets?\.(toml|ya?ml|json|ini|env)"),
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
    ("cookies of a browser", re.compile(rb"# (Netscape )?HTTP Cookie File")),
)
_IN_JSON = re.compile(
    rb'"(private_key|privateKey|client_secret|clientSecret|refresh_token|aws_secret_access_key|'
    rb'SecretAccessKey|secret_key|secretKey)"\s*:\s*"[^"]{8}'
)
_LONG_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----(\\n|\s)")
"""A key in quotes, as in JSON, or behind something else."""


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
    kind = next((kind for kind, pattern in _HEADS if pattern.match(head)), "")
    if not kind and head.lstrip()[:1] in (b"{", b"["):
        if _LONG_KEY.search(head):
            return "JSON with a private key"
        if _IN_JSON.search(head):
            return "JSON with a secret"
    return kind
