"""The plan of an environment: the wheels of a script for each kind of machine. Pure.

The starter of a job makes it, and signs its hash with the job. A machine takes the part of its own
kind, and checks each wheel by SHA-256 before it is used.
"""

from __future__ import annotations

import ipaddress
from hashlib import sha256
from typing import Annotated
from urllib.parse import unquote, urlsplit

import msgspec

from potluck._core.cluster.environments.kinds import in_words
from potluck._core.wire.format import Digest, Name, Text, decoded
from potluck.errors import ConfigurationError, ProtocolError

SCHEMA = 1
MAX_WHEELS = 4096
MAX_KINDS = 64
MAX_WHEEL_BYTES = 16 << 30

Project = Annotated[str, msgspec.Meta(max_length=128, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Version = Annotated[str, msgspec.Meta(max_length=128, pattern=r"\A[A-Za-z0-9][A-Za-z0-9.!+_-]*\Z")]
File = Annotated[
    str, msgspec.Meta(max_length=255, pattern=r"\A[A-Za-z0-9][\w.!+-]*\.(?:whl|tar\.gz)\Z")
]


class Wheel(msgspec.Struct, frozen=True, order=True):
    """A wheel: the ``file`` of release ``version`` of the project ``name``, of ``size`` bytes, and
    where it is published. Or the source distribution of which each machine builds one."""

    name: Project
    version: Version
    file: File
    sha256: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_WHEEL_BYTES)]
    url: Text

    @property
    def is_source(self) -> bool:
        """Whether it is a source distribution."""
        return not self.file.endswith(".whl")


class Part(msgspec.Struct, frozen=True):
    """The wheels for machines of one ``kind``, and the ``tools``, wheels by which those that are
    sources are built; or, with an ``error``, why there are none."""

    kind: Name
    wheels: Annotated[tuple[Wheel, ...], msgspec.Meta(max_length=MAX_WHEELS)] = ()
    error: Text = ""
    tools: Annotated[tuple[Wheel, ...], msgspec.Meta(max_length=MAX_WHEELS)] = ()

    @property
    def files(self) -> tuple[Wheel, ...]:
        """All that a machine fetches."""
        return tuple(dict.fromkeys(self.wheels + self.tools))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a script: what ``source`` asks for, under the given minor version of
    Python, with potluck's own dependencies, but without potluck: each machine adds its own."""

    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    python: Annotated[str, msgspec.Meta(pattern=r"\A3\.\d{1,3}\Z")]
    source: Name
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_KINDS)]

    def encode(self) -> bytes:
        """As JSON; the same for equal plans."""
        return msgspec.json.encode(self)

    def part(self, kind: str) -> Part:
        """The part for machines of ``kind``. ConfigurationError if there is none: the text follows
        the name of the machine."""
        for part in self.parts:
            if part.kind == kind:
                if part.error:
                    raise ConfigurationError(part.error)
                return part
        kinds = ", ".join(in_words(part.kind) for part in self.parts)
        raise ConfigurationError(
            f"came later, and is {in_words(kind)}: the job's packages were chosen for {kinds} "
            "when it was started; start it again to have this machine in it"
        )


_decoder = msgspec.json.Decoder(Plan)


def decode_plan(data: bytes) -> Plan:
    """The plan in ``data``; ProtocolError if that is none, or two wheels have one name."""
    plan = decoded(_decoder, data, "a plan of an environment")
    for part in plan.parts:
        if len({wheel.file.lower() for wheel in part.files}) != len(part.files):
            raise ProtocolError("a plan of an environment with two wheels of one name")
    return plan


def environment_key(part: Part, python: str, own: bytes) -> str:
    """The name of the environment made of ``part`` for this ``python`` (its release), with the
    potluck whose wheel has the hash ``own``."""
    hashed = sha256(f"{SCHEMA} {part.kind} {python}\n".encode())
    hashed.update(own + b"".join(sorted(wheel.sha256 for wheel in part.files)))
    return hashed.hexdigest()[:32]


def file_of(url: str) -> str:
    """The name of the file at ``url``."""
    return unquote(urlsplit(url).path.rpartition("/")[2])


def objection_to_url(url: str, *, own: str = "") -> str:
    """Why no machine fetches a wheel from ``url``; empty if it may. ``own`` is the index that this
    machine's owner named, whose host may be a private one."""
    try:
        parts, index = urlsplit(url), urlsplit(own)
        host = parts.hostname or ""
        same = (parts.hostname, parts.port) == (index.hostname, index.port)
    except ValueError:
        return "it is no URL"
    if parts.scheme not in ("http", "https") or not host:
        return "only http and https are used"
    if parts.username is not None or parts.password is not None:
        return "it has a user name or password, and credentials do not travel"
    return "" if same else objection_to_host(host)


_KNOWN_HOSTS = ("pypi.org", "files.pythonhosted.org", "download.pytorch.org")


def is_known_host(url: str) -> bool:
    """Whether ``url`` leads to an index that everybody uses, by https: whatever address a network
    has for its name (that of a cache, say), TLS proves who answers."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    of_torch = host.startswith("download-") and host.endswith(".pytorch.org")
    return parts.scheme == "https" and (host in _KNOWN_HOSTS or of_torch)


def objection_to_host(host: str) -> str:
    """Why ``host``, a name or an address, is not asked for wheels; empty if it may be."""
    private = "is not a public address: name this index by POTLUCK_PACKAGE_INDEX on each machine"
    if host.lower().rstrip(".").rpartition(".")[2] in ("localhost", "local", "internal"):
        return f"{host} {private}"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    return "" if address.is_global else f"{host} {private}"
