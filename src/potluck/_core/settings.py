"""Settings: every default of potluck with its unit and its environment variable.

``Settings()`` has the defaults only. Programs call ``load_settings()``: arguments win over
environment variables (``POTLUCK_`` and the field's name in capitals), which win over defaults.
"""

from __future__ import annotations

import functools
import os
import socket
import typing
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from potluck._core.checks import checked_seconds
from potluck._core.printable import MAX_NAME, PRINTABLE, name_of
from potluck._core.types import MAX_SITE, Site
from potluck.errors import ConfigurationError

PREFIX = "POTLUCK_"


@dataclass(frozen=True, slots=True)
class About:
    """The meaning and unit of a setting, kept in its type annotation for errors and
    ``docs/settings.md``."""

    text: str


Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
Slots = Annotated[int, Meta(ge=1, le=1024)]
SlotBytes = Annotated[int, Meta(ge=4096, le=1 << 28, multiple_of=4096)]
Level = Literal["debug", "info", "warning", "error"]


def _default_home() -> Path:
    return Path.home() / ".potluck"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """potluck's settings. Fields left out of the repr are secrets, which appear in no error."""

    home: Annotated[Path, About("directory of the node's key and the cluster's secret")] = field(
        default_factory=_default_home
    )
    name: Annotated[
        str,
        Meta(max_length=MAX_NAME, pattern=PRINTABLE),
        About(
            f"what people call this machine, at most {MAX_NAME} printable characters; by default "
            "its host name"
        ),
    ] = ""
    site: Annotated[
        Site,
        About(
            "where this machine stands: up to 4 levels, the outermost first, such as home or "
            "home/rack1; letters, digits, '.', '_' and '-' in each, at most "
            f"{MAX_SITE} characters in all"
        ),
    ] = ""
    psk: Annotated[
        str | None, About("the cluster secret, 64 hexadecimal digits; instead of the file")
    ] = field(default=None, repr=False)
    passphrase: Annotated[
        str | None, About("words that the cluster secret is made from (scrypt); instead of a file")
    ] = field(default=None, repr=False)
    cluster: Annotated[
        str,
        About(
            "a name of your own for a cluster with POTLUCK_PASSPHRASE, the same on all machines: "
            "the salt of the words"
        ),
    ] = ""
    worker_home: Annotated[
        str,
        About("folder with the credentials of a worker; set by the agent that started the worker"),
    ] = ""
    bind: Annotated[
        str, About("interface or address to listen on and look for others; by default all")
    ] = ""
    gradient_port: Annotated[
        Port, About("TCP port of the first worker's links; the next worker's is one higher; 0: any")
    ] = 52416
    discovery_port: Annotated[
        Port, About("port on which nodes look for each other (UDP) and their agents talk (TCP)")
    ] = 52415
    discovery: Annotated[
        str, About("ways to find peers, separated by commas: mdns, beacon, static")
    ] = "mdns,beacon,static"
    peers: Annotated[
        str, About("nodes to connect to if multicast is dropped: host or host:port, with commas")
    ] = ""
    min_peers: Annotated[
        int,
        Meta(ge=0),
        About("other nodes to wait for before a job starts; with discovery: other processes"),
    ] = 0
    peer_timeout_s: Annotated[
        Seconds, About("seconds an operation waits for a peer before it gives up")
    ] = 30.0
    connection_timeout_s: Annotated[Seconds, About("seconds for one attempt to connect")] = 5.0
    max_retries: Annotated[
        int, Meta(ge=0, le=1000), About("attempts to connect after the first one failed")
    ] = 3
    hello_timeout_s: Annotated[
        Seconds, About("seconds that a connecting peer has to authenticate itself")
    ] = 5.0
    max_pending: Annotated[
        int,
        Meta(ge=1, le=10_000),
        About("most connections at one time that are not authenticated yet"),
    ] = 64
    bucket_size_mb: Annotated[
        float, Meta(gt=0, le=65_536), About("megabytes (2**20 bytes) of gradients reduced together")
    ] = 25.0
    segment_bytes: Annotated[Bytes, About("most bytes of payload in one frame")] = 1 << 19
    max_early_bytes: Annotated[
        Bytes, About("bytes kept per link for operations this rank has not begun yet")
    ] = 2 << 20
    max_call_bytes: Annotated[
        Bytes,
        About("most bytes of the arrays of one call of a service, and of all calls at one worker"),
    ] = 1 << 30
    use_shared_memory: Annotated[
        bool, About("whether workers of one node exchange payloads through shared memory")
    ] = True
    shared_memory_slots: Annotated[Slots, About("shared memory slots per link and direction")] = 4
    shared_memory_slot_bytes: Annotated[SlotBytes, About("bytes of one slot, whole pages")] = (
        1 << 20
    )
    allow_root: Annotated[
        bool, About("whether potluck up runs as root, which gives root to scripts of other members")
    ] = False
    run_for: Annotated[
        str, About("whose scripts potluck up runs: all, ask, none, or nodes with commas between")
    ] = ""
    cpus: Annotated[int, Meta(ge=0), About("processors that potluck up gives to jobs; 0: all")] = 0
    memory: Annotated[str, About("memory that potluck up gives to jobs: 8GiB, 50%; empty: all")] = (
        ""
    )
    nice: Annotated[
        int, Meta(ge=0, le=19), About("priority of jobs under potluck up: 0, or 19, the lowest")
    ] = 0
    gpus: Annotated[str, About("GPUs that potluck up gives to jobs: 0,2, or none; empty: all")] = ""
    sandbox: Annotated[
        bool, About("whether potluck up runs scripts of other members in a sandbox (bubblewrap)")
    ] = False
    sandbox_read: Annotated[
        str, About("files and folders in a home that scripts in the sandbox may read, with commas")
    ] = ""
    sandbox_network: Annotated[
        bool, About("whether scripts in the sandbox may use the whole network")
    ] = False
    pass_env: Annotated[
        str, About("variables of potluck up that workers get beside the usual: NAME,PREFIX_*")
    ] = ""
    keep_results_days: Annotated[
        float,
        Meta(gt=0, le=36_500),
        About("days for which files that the workers of a job wrote are kept on their machine"),
    ] = 14.0
    keep_results_gb: Annotated[
        float,
        Meta(gt=0, le=1_000_000),
        About("gigabytes (2**30 bytes) of such files that this machine keeps, the newest first"),
    ] = 20.0
    environments: Annotated[
        Literal["off", "wheels", "builds"],
        About(
            "whether this machine makes the environment that a script asks for: wheels (it fetches "
            "and installs wheels), builds (from source as well, in a sandbox), or off: such a "
            "script does not run here"
        ),
    ] = "wheels"
    environments_gb: Annotated[
        float,
        Meta(gt=0, le=1_000_000),
        About("gigabytes (2**30 bytes) of environments and wheels that this machine keeps"),
    ] = 20.0
    data: Annotated[
        str,
        About(
            "the disk that data sets of jobs of other machines may take on this one: 50G; off: it "
            "takes no part in jobs with data"
        ),
    ] = "20G"
    package_index: Annotated[
        str,
        About(
            "the package index that is asked instead of PyPI, also one at a private address: "
            "http://10.0.0.5:3141/simple"
        ),
    ] = ""
    log_level: Annotated[Level, About("least important log lines to show")] = "warning"

    @property
    def machine_name(self) -> str:
        """``name``, or the host name if that is empty; at most ``MAX_NAME`` characters."""
        return name_of(self.name or socket.gethostname())


def environment_name(setting: str) -> str:
    """The environment variable of a field: ``POTLUCK_GRADIENT_PORT`` for ``gradient_port``."""
    return PREFIX + setting.upper()


def load_settings(**arguments: Any) -> Settings:
    """The settings of this process: defaults, replaced by the environment, then by ``arguments``.

    An argument that is None, or an empty variable, counts as not set. TypeError for an argument
    that is no setting.
    ConfigurationError names the variable or argument, its value (never a secret's) and what is
    expected there.
    """
    unknown = sorted(arguments.keys() - _fields().keys())
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}")
    given = {name: os.environ.get(environment_name(name)) or None for name in _fields()}
    given |= {name: value for name, value in arguments.items() if value is not None}
    values: dict[str, Any] = {}
    problems = []
    for name, value in given.items():
        if value is None:
            continue
        try:
            if name.endswith("_s") and not isinstance(value, str):
                value = checked_seconds(value, name)
            values[name] = _converted(value, _types()[name])
        except (ValueError, TypeError):  # its text may quote a secret: it is dropped
            shown = repr(value) if _fields()[name].repr else "(not shown)"
            expected = _expected(_types()[name])
            where = _source(name, arguments)
            problems.append(f"{where}={shown}: input should be {expected} ({_about(name)})")
    if problems:
        raise ConfigurationError("; ".join(problems)) from None
    settings = Settings(**values)
    if settings.psk is not None and settings.passphrase is not None:
        both = " and ".join(_source(name, arguments) for name in ("psk", "passphrase"))
        raise ConfigurationError(f"{both} are both set: each gives the cluster secret; unset one")
    try:
        return replace(settings, home=settings.home.expanduser())
    except RuntimeError as error:
        where = _source("home", arguments)
        raise ConfigurationError(f"{where}={str(settings.home)!r}: {error}") from None


def _source(name: str, arguments: dict[str, Any]) -> str:
    """Where the value of a setting comes from, as errors name it: an argument or a variable."""
    return environment_name(name) if arguments.get(name) is None else f"argument {name}"


_TRUE, _FALSE = ("1", "on", "t", "true", "y", "yes"), ("0", "off", "f", "false", "n", "no")
_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    Path: Path,
    bool: lambda text: [*_FALSE, *_TRUE].index(text.strip().lower()) >= len(_FALSE),
}


def _converted(value: Any, kind: Any) -> Any:
    """``value`` as the type ``kind``; ValueError or TypeError if that is impossible."""
    base = kind.__origin__
    if isinstance(value, str) and base in _FROM_TEXT:
        value = _FROM_TEXT[base](value)
    return msgspec.convert(value, kind)


def _expected(kind: Any) -> str:
    """What a setting of this type accepts, in words."""
    base = kind.__origin__
    if typing.get_origin(base) is Literal:
        *words, last = map(repr, typing.get_args(base))
        return f"{', '.join(words)} or {last}"
    text = _WORDS.get(base, "text")
    for bounds in kind.__metadata__:
        if isinstance(bounds, Meta):
            limits = (getattr(bounds, name) for name in _BOUNDS)
            said = zip(_BOUNDS.values(), limits, strict=True)
            text += "".join(f", {words} {limit}" for words, limit in said if limit is not None)
    return text


_WORDS = {
    int: "a valid integer",
    float: "a valid number",
    Path: "a path",
    bool: f"a valid boolean: {', '.join(_TRUE)}; {', '.join(_FALSE)}",
}
_BOUNDS = {
    "gt": "greater than",
    "ge": "at least",
    "le": "less than or equal to",
    "multiple_of": "a multiple of",
}


def _fields() -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(Settings)}


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(Settings, include_extras=True)


def _about(name: str) -> str:
    return next(each.text for each in _types()[name].__metadata__ if isinstance(each, About))
