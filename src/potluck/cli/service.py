"""``potluck up`` as a service of the person's session: a user unit of systemd, or a launchd agent.

The service gets the settings that hold when it is installed, those of options and of POTLUCK_*
variables alike; whose scripts run is kept in potluck's home, as ``potluck up --run-for`` does.
"""

from __future__ import annotations

import getpass
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from potluck._core.cluster.home.node_state import find_agent
from potluck._core.settings import Settings, environment_name
from potluck.cli.terminal import say
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAME = "potluck"
_STAY_S = 90
"""An agent that is told to end has this long for the workers of its jobs."""
_ASK_S = _STAY_S + 30.0
"""`systemctl disable --now` and `launchctl bootout` return when the agent has ended."""

_UNIT = """\
# Written by `potluck up --install-service`; `potluck up --remove-service` removes it.
[Unit]
Description=potluck: this machine's agent

[Service]
ExecStart={command}
{environment}
Restart=on-failure
RestartSec=5
# Workers get control groups of their own below this one.
Delegate=yes
# A worker that runs out of memory must not take the agent with it.
OOMPolicy=continue
# The agent ends its workers itself; what is left after that is killed.
KillMode=mixed
TimeoutStopSec={stay_s}

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True)
class Service:
    """What ``potluck up`` is to run as: the words of the command, and its variables."""

    command: tuple[str, ...]
    environment: dict[str, str]

    @classmethod
    def of(cls, settings: Settings) -> Service:
        """The service with these settings. ConfigurationError if it could not start later."""
        secret = "POTLUCK_PSK" if settings.psk else "POTLUCK_PASSPHRASE"
        if settings.psk or settings.passphrase:
            raise ConfigurationError(
                f"the cluster's secret comes from {secret}, which a service does not see, and a "
                "secret does not belong into its file: unset it, and enter `potluck init` or "
                "`potluck join`, which keep one in potluck's home"
            )
        if "cache" in sys.prefix.lower():
            raise ConfigurationError(
                f"potluck runs from a cache ({sys.prefix}), which may be emptied under the "
                "service: install it first, with `uv tool install potluck`"
            )
        default, found = Settings(), {}
        for each in fields(Settings):
            # The rule is kept in the home, where `potluck allow` changes it.
            value = getattr(settings, each.name)
            if each.name != "run_for" and value != getattr(default, each.name):
                value = value.absolute() if isinstance(value, Path) else value
                text = str(int(value)) if isinstance(value, bool) else str(value)
                if not text.isprintable():
                    raise ConfigurationError(
                        f"{environment_name(each.name)}={text!r} can't be written into the "
                        "service's file: it has characters that can't be printed"
                    )
                found[environment_name(each.name)] = text
        return cls((str(Path(sys.executable).with_name("potluck")), "up"), found)

    def unit(self) -> str:
        """The text of a user unit of systemd."""
        command = " ".join(_quoted(word).replace("$", "$$") for word in self.command)
        lines = (f"Environment={_quoted(f'{k}={v}')}" for k, v in self.environment.items())
        return _UNIT.format(command=command, environment="\n".join(lines), stay_s=_STAY_S)

    def agent(self) -> str:
        """The text of a property list of launchd, which rotates no logs: potluck does."""
        log = Path.home() / "Library" / "Logs" / "potluck.log"
        content = {
            "Label": _NAME,
            "ProgramArguments": [*self.command, "--log", str(log)],
            "EnvironmentVariables": self.environment,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": _STAY_S,
        }
        return plistlib.dumps(content).decode()


def _quoted(word: str) -> str:
    """``word`` in a unit file: quoted, without specifiers."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


@dataclass(frozen=True)
class Manager:
    """The program that runs services here: the file it reads, and what to call before and after
    that file is there."""

    path: Path
    text: str
    start: tuple[tuple[str, ...], ...]
    end: tuple[tuple[str, ...], ...]
    log: str

    @classmethod
    def here(cls, service: Service | None = None) -> Manager:
        """That of this machine. ConfigurationError if there is none."""
        if sys.platform == "darwin":
            path = Path.home() / "Library" / "LaunchAgents" / f"{_NAME}.plist"
            domain = f"gui/{os.getuid()}"
            return cls(
                path,
                service.agent() if service else "",
                (("launchctl", "bootstrap", domain, str(path)),),
                (("launchctl", "bootout", f"{domain}/{_NAME}"),),
                "tail -f ~/Library/Logs/potluck.log",
            )
        systemctl = ("systemctl", "--user")
        if shutil.which("systemctl") is None or _asked((*systemctl, "show-environment")):
            raise ConfigurationError(
                "no systemd runs services of this user here (`systemctl --user status` says why). "
                "Have what starts programs on this machine start `potluck up`"
            )
        configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        unit = f"{_NAME}.service"
        return cls(
            Path(configuration) / "systemd" / "user" / unit,
            service.unit() if service else "",
            ((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", unit)),
            ((*systemctl, "disable", "--now", unit),),
            f"journalctl --user -u {_NAME} -f",
        )


def install_service(settings: Settings, keep_rule: Callable[[], None]) -> None:
    """Install the service and start it; ``keep_rule()`` keeps whose scripts run.
    ConfigurationError, with nothing left behind, if that is not possible."""
    manager = Manager.here(Service.of(settings))
    if manager.path.exists():
        same = manager.path.read_text() == manager.text
        raise ConfigurationError(
            f"the service is installed already{'' if same else ', with other settings'} "
            f"({manager.path}). To install it anew: potluck up --remove-service"
        )
    if (agent := find_agent(settings.home)) is not None:
        raise ConfigurationError(
            f"an agent runs here already (process {agent.pid}): end it, with Ctrl-C in its "
            "terminal, then install the service, which starts its own"
        )
    keep_rule()
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_text(manager.text)
    for command in manager.start:
        if trouble := _asked(command):
            for each in manager.end:
                _asked(each)
            manager.path.unlink(missing_ok=True)
            raise ConfigurationError(f"the service was not installed: {trouble}")
    say(f"potluck: potluck up runs as a service now, and after each login ({manager.path})")
    say(f"potluck: what it says: {manager.log}; its end: potluck up --remove-service")
    asked = ("loginctl", "show-user", getpass.getuser(), "--property=Linger", "--value")
    if sys.platform != "darwin" and _called(asked)[0] != "yes":
        say(
            "potluck: it ends when you log out, and starts when you log in. To have it run from "
            f"the machine's start on: loginctl enable-linger {getpass.getuser()}"
        )


def remove_service() -> None:
    """End the service and remove its file; ConfigurationError if there is none."""
    manager = Manager.here()
    if not manager.path.exists():
        raise ConfigurationError(f"no service is installed ({manager.path})")
    for command in manager.end:
        if trouble := _asked(command):
            raise ConfigurationError(f"the service could not be ended: {trouble}")
    manager.path.unlink(missing_ok=True)
    if sys.platform != "darwin":
        _asked(manager.start[0])
    say("potluck: the service has ended and is removed")


def _asked(command: Sequence[str]) -> str:
    """Run ``command``; what went wrong, in words, empty if nothing did."""
    return _called(command)[1]


def _called(command: Sequence[str]) -> tuple[str, str]:
    """What ``command`` wrote, and what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{shlex.join(command)}: {error}"
    trouble = f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}"
    return done.stdout.strip(), trouble if done.returncode else ""
