"""``potluck up --install-service``: the files, and what systemctl is asked. systemd itself checks
the unit file where it is installed."""

from __future__ import annotations

import logging
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck._core.cluster.sharing.offers import SharingStore
from potluck._core.settings import Settings
from potluck.cli import service
from potluck.cli.main import app
from potluck.cli.service import Service
from potluck.cli.terminal import RotatedLog
from potluck.errors import ConfigurationError

SYSTEMCTL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in *"$BREAKS"*) echo "Failed: no bus" >&2; exit 1;; esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A session with a systemd that notes what it is asked; fails at what ``BREAKS`` says."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemctl", "loginctl"):
        (programs / name).write_text(SYSTEMCTL)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("BREAKS", "nothing of this kind")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POTLUCK_ALLOW_ROOT", "1")
    monkeypatch.setattr(sys, "platform", "linux")
    handlers = logging.getLogger().handlers[:]
    yield tmp_path / "calls"
    logging.getLogger().handlers[:] = handlers


def up(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["up", *options])
    return done.exit_code, " ".join(done.output.split())


def unit_of(calls: Path) -> Path:
    return calls.parent / "config/systemd/user/potluck.service"


def test_a_service_is_installed_with_its_options_and_removed(calls: Path) -> None:
    code, said = up("--install-service", "--memory=50%", "--site=home/attic", "--run-for=none")
    assert code == 0, said
    assert "loginctl enable-linger" in said
    assert "journalctl --user -u potluck" in said
    text = unit_of(calls).read_text()
    for line in (
        'Environment="POTLUCK_MEMORY=50%%"',
        'Environment="POTLUCK_SITE=home/attic"',
        f'Environment="POTLUCK_HOME={calls.parent / "home"}"',
        'Environment="POTLUCK_ALLOW_ROOT=1"',
        "Delegate=yes",
        "OOMPolicy=continue",
        "KillMode=mixed",
    ):
        assert line in text.splitlines()
    assert "RUN_FOR" not in text
    offer = SharingStore(calls.parent / "home").read()
    assert offer is not None
    assert offer.rule == "none"
    if program := shutil.which("systemd-analyze"):
        # "up" is looked for: the program has to be there and executable.
        checked = subprocess.run(
            [program, "--user", "verify", str(unit_of(calls))], capture_output=True, text=True
        )
        assert "potluck.service" not in checked.stderr, checked.stderr

    code, said = up("--install-service", "--memory=4GiB")
    assert (code, "with other settings" in said, "--remove-service" in said) == (2, True, True)
    code, said = up("--remove-service")
    assert code == 0, said
    assert not unit_of(calls).exists()
    asked = [line for line in calls.read_text().splitlines() if "show" not in line]
    assert asked == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now potluck.service",
        "systemctl --user disable --now potluck.service",
        "systemctl --user daemon-reload",
    ]
    code, said = up("--remove-service")
    assert (code, "no service is installed" in said) == (2, True)


def test_a_service_that_does_not_start_leaves_nothing_behind(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKS", "enable --now")
    code, said = up("--install-service")
    assert (code, "Failed: no bus" in said) == (2, True)
    assert not unit_of(calls).exists()


def test_without_systemd_the_way_out_is_named(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKS", "show-environment")
    code, said = up("--install-service")
    assert (code, "no systemd runs services of this user" in said) == (2, True)
    assert not unit_of(calls).exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(psk="7" * 64), "a secret does not belong"),
        (Settings(passphrase="a b c"), "a secret does not belong"),
        (Settings(peers="attic\nExecStart=evil"), "can't be printed"),
    ],
)
def test_what_does_not_belong_into_the_file_is_refused(settings: Settings, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        Service.of(settings)
    assert "7777" not in str(caught.value)


def test_a_potluck_in_a_cache_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/ada/.cache/uv/archive-v0/x")
    with pytest.raises(ConfigurationError, match="uv tool install potluck"):
        Service.of(Settings())


def test_the_property_list_of_macos_has_the_same(tmp_path: Path) -> None:
    service = Service.of(Settings(home=tmp_path, cpus=2, name='a "b" & <c>'))
    told = plistlib.loads(service.agent().encode())
    assert told["EnvironmentVariables"]["POTLUCK_NAME"] == 'a "b" & <c>'
    assert told["EnvironmentVariables"]["POTLUCK_CPUS"] == "2"
    assert told["ProgramArguments"][1:3] == ["up", "--log"]


def test_a_log_is_rotated_and_bounded(tmp_path: Path) -> None:
    with RotatedLog(tmp_path / "log") as log:
        for number in range(6000):
            log.write(f"line {number}\n" + 1000 * "x" + "\n")
    files = sorted(each.name for each in tmp_path.iterdir())
    assert files == ["log", "log.1", "log.2", "log.3"]
    assert all(each.stat().st_size <= 1 << 20 for each in tmp_path.iterdir())
    assert "line 5999" in (tmp_path / "log").read_text()
    with pytest.raises(ConfigurationError, match="no directory"):
        RotatedLog(tmp_path / "away" / "log")


def test_what_ends_the_service_has_longer_than_the_agent_may_take() -> None:
    assert service._ASK_S > service._STAY_S
