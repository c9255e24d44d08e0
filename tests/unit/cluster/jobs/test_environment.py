"""Which variables of a machine its workers get, and which never."""

from __future__ import annotations

import pytest

from potluck._core.cluster.jobs.environment import (
    accepted,
    all_but_secrets,
    given_variables,
    passed_on,
)
from potluck.errors import ConfigurationError

USUAL = {
    "PATH": "/usr/bin",
    "HOME": "/home/ada",
    "LC_ALL": "C.UTF-8",
    "PYTHONPATH": "/opt/lib",
    "CONDA_PREFIX": "/opt/conda",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "4",
    "HF_HOME": "/data/hf",
    "HF_HUB_CACHE": "/data/hub",
    "TOKENIZERS_PARALLELISM": "false",
    "POTLUCK_DATA": "/data",
    "POTLUCK_PASS_ENV": "",
}
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIA",
    "AWS_SECRET_ACCESS_KEY": "s",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "GPG_AGENT_INFO": "x",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus",
    "HF_TOKEN": "hf_x",
    "HF_TOKEN_CACHE": "x",
    "WANDB_API_KEY": "x",
    "GITHUB_TOKEN": "ghp_x",
    "CONDA_TOKEN": "x",
    "TORCH_HUB_TOKEN": "x",
    "PYTHON_KEYRING_PASSWORD": "x",
    "POTLUCK_PSK": "ab" * 32,
    "POTLUCK_PASSPHRASE": "one two three four",
    "HTTPS_PROXY": "http://ada:secret@proxy",
    "XDG_RUNTIME_DIR": "/run/user/1000",
}


def test_workers_of_others_get_what_programs_need_and_no_secret() -> None:
    assert passed_on(USUAL | SECRETS | {"EDITOR": "vi"}, "") == USUAL


def test_the_owner_adds_names_and_prefixes() -> None:
    machine = {"SLURM_JOB_ID": "7", "SLURM_JWT": "x", "DATA": "/data", "WANDB_API_KEY": "x"}
    assert passed_on(machine, "DATA, SLURM_*") == {"SLURM_JOB_ID": "7", "DATA": "/data"}
    assert passed_on(machine, "WANDB_API_KEY") == {"WANDB_API_KEY": "x"}, "by its full name only"
    assert passed_on(machine, "*") == {"SLURM_JOB_ID": "7", "DATA": "/data"}


def test_the_clusters_secret_is_never_passed_on_whoever_asks() -> None:
    assert passed_on(SECRETS, "POTLUCK_PSK,POTLUCK_*,POTLUCK_PASSPHRASE") == {}


def test_a_users_own_workers_get_all_but_the_clusters_secret() -> None:
    kept = {
        name: value
        for name, value in SECRETS.items()
        if name not in ("POTLUCK_PSK", "POTLUCK_PASSPHRASE")
    }
    assert all_but_secrets(USUAL | SECRETS) == USUAL | kept


def test_a_sender_gives_variables_by_value_or_takes_them_along() -> None:
    here = {"RUN": "7", "EMPTY": ""}
    given = given_variables(["A=b=c", "RUN", "EMPTY", "NOTHING="], here)
    assert given == (("A", "b=c"), ("RUN", "7"), ("EMPTY", ""), ("NOTHING", ""))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write NAME=VALUE"),
        ("=x", "write NAME=VALUE"),
        ("1A=x", "write NAME=VALUE"),
        ("GONE", "it is not set here; write GONE=VALUE"),
        ("RANK=3", "potluck sets this variable itself"),
        ("POTLUCK_HOME=/tmp", "potluck sets this variable itself"),
        ("A=\0", "NUL"),
    ],
)
def test_variables_that_can_not_be_given_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        given_variables([text], {})


def test_a_machine_takes_no_variable_of_potlucks_from_a_sender() -> None:
    """Its command refuses them, but a member need not have used our command."""
    given = [("POTLUCK_HOME", "/tmp"), ("RANK", "0"), ("A", "1"), ("B=", "2"), ("", "3")]
    assert accepted(given) == {"A": "1"}
