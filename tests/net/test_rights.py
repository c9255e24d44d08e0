"""What a member may do on another member's machine: on hosts, with real scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.cluster.trust.keyring import replace_secret
from support.machines import PSK, cluster_of, form

pytestmark = pytest.mark.needs_root_netns

LOOKER = """
import os
print("variables", *sorted(os.environ))
print("given", os.environ.get("GIVEN"), os.environ.get("TAKEN"), os.environ.get("DATA"))
"""
OWNERS = {
    "AWS_SECRET_ACCESS_KEY": "aws",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "HF_TOKEN": "hf",
    "SLURM_PROCID": "3",
    "DATA": "/data",
    "POTLUCK_PASS_ENV": "DATA",
}


def test_a_script_of_another_member_finds_no_key_of_the_owner(tmp_path: Path) -> None:
    script = tmp_path / "code" / "look.py"
    script.parent.mkdir()
    script.write_text(LOOKER)
    with cluster_of(2, tmp_path / "homes", psk="", **OWNERS) as (ada, bob):
        for each in (ada, bob):
            replace_secret(each.home, bytes.fromhex(PSK))
        form(ada, bob)
        ada.environment["TAKEN"] = "along"
        with ada.run("--env", "GIVEN=value", "--env", "TAKEN", script) as run:
            assert run.finish() == 0, run.text
            variables = [line for line in run.lines if "] variables " in line]
            assert len(variables) == 2, run.text
            for line in variables:
                names = set(line.split())
                assert {"PATH", "HOME", "RANK", "POTLUCK_HOME", "DATA"} <= names
                unwanted = {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HF_TOKEN", "SLURM_PROCID"}
                assert not names & (unwanted | {"POTLUCK_PSK", "POTLUCK_PASSPHRASE"})
            assert sum("] given value along /data" in line for line in run.lines) == 2, run.text
