"""Names and beginnings of files that are keys or credentials, and of those that only look so."""

from __future__ import annotations

import pytest

from potluck._core.cluster.code_store.selection import kind_of_head, kind_of_name

KEYS = """
    id_rsa id_ed25519 id_rsa_github id_ed25519.bak id_work id_ecdsa_sk ID_RSA ssh_host_rsa_key
    server.pem tls.key Server.KEY server.key~ id_rsa.old store.p12 a.pfx a.jks a.keystore a.kdbx
    office.ovpn putty.ppk http.keytab wallet.dat
    credentials credentials.json credentials-prod.yml aws_credentials credentials.json.bak
    application_default_credentials.json .git-credentials .netrc _netrc .npmrc .pypirc .pgpass
    service-account.json my-service-account-1.json service_account_key.json serviceAccount.json
    client_secret_123.json secrets.toml secret.txt .secrets secrets.prod.yaml password.txt
    token token.json token.txt token.pickle .token hf_token github_token.txt access-token
    api_key.txt .env .env.local prod.env .envrc kubeconfig kubeconfig.yaml
    cluster_secret cluster_secret.abcd1234.old node_keypair
    gcp-key.json key.json sa.json sa-key.json google_key.json my-app-firebase-adminsdk-x1.json
    firebase-adminsdk-x.json terraform.tfstate terraform.tfstate.backup prod.tfvars
    terraform.tfvars.json pgpass pgpass.conf my.cnf .my.cnf streamlit_secrets.toml
    my_secrets.yaml cookies.txt youtube_cookies.txt cookies.sqlite netrc rclone.conf .s3cfg
"""

DATA = """
    tokenizer.json tokenizer_config.json tokens.txt special_tokens_map.json added_tokens.json
    token_counts.csv cls_token.npy token.py secrets.py secret_santa.csv credentials.py kubeconfig.py
    monkey.py monkey keys.py keys.npy key hockey.json keyboard.txt turkey.csv data.keys public.txt
    id_map.csv id_list.txt ids.txt idx.npy identity.json id_cols.parquet id_rsa.pub pem.csv
    answer_key.json keyed.json sa.csv cookie_counts.csv cookies.csv my.cnf.md main.tf state.json
    secrets_detected.csv key_points.json keys.json usa.json hotkey.json boto_test.py
    environment.yml env.yaml environ.txt secretary.csv password_strength.csv accounts.csv train.py
"""


def test_a_name_of_a_key_is_known() -> None:
    assert [name for name in KEYS.split() if not kind_of_name(name)] == []


def test_a_name_of_data_or_code_is_none() -> None:
    assert [name for name in DATA.split() if kind_of_name(name)] == []


@pytest.mark.parametrize(
    "head",
    [
        b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl",
        b"-----BEGIN PRIVATE KEY-----\nMC4C",
        b"\n-----BEGIN RSA PRIVATE KEY-----",
        b"-----BEGIN PGP PRIVATE KEY BLOCK-----",
        b"PuTTY-User-Key-File-3: ssh-ed25519",
        b"AGE-SECRET-KEY-1",
    ],
)
def test_a_key_is_known_by_its_beginning(head: bytes) -> None:
    assert kind_of_head(head)


@pytest.mark.parametrize(
    "text",
    [
        b'{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\\nMC4C"}',
        b'\n [{"client_secret":"GOCSPX-abcdefgh"}]',
        b'{"installed": {"client_id": "x", "client_secret" : "GOCSPX-abcdefgh"}}',
        b'{"refresh_token": "1//0abcdefgh", "type": "authorized_user"}',
        b'{"Credentials": {"SecretAccessKey": "abcdefghijkl"}}',
        b"{" + b" " * 9000 + b'"secret_key": "abcdefghijkl"}',
        b"# Netscape HTTP Cookie File\n.example.org",
    ],
)
def test_a_file_of_any_name_is_known_by_the_secret_in_it(text: bytes) -> None:
    assert kind_of_head(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"question": "what is a private_key?", "answer": "-----BEGIN"}',
        b'{"private_key": null, "client_secret": ""}',
        b'{"private_key": "<yours>"}',
        b'"client_secret": "abcdefghijkl"  # no JSON, a line of a text',
        b'{"tokens": [1, 2], "refresh_tokens": 8}',
    ],
)
def test_json_that_only_names_secrets_travels(text: bytes) -> None:
    assert not kind_of_head(text)


@pytest.mark.parametrize(
    "head", [b"", b"-----BEGIN CERTIFICATE-----", b"-----BEGIN PUBLIC KEY-----", b"import torch"]
)
def test_what_is_public_is_no_key(head: bytes) -> None:
    assert not kind_of_head(head)
