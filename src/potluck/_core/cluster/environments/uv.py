"""Running uv, which resolves, makes environments and installs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from potluck._core.printable import plain
from potluck._core.system import SIGKILL, need_posix
from potluck.errors import ConfigurationError

_DROPPED = ("UV_*", "VIRTUAL_ENV", "CONDA_*", "PYTHON*", "PIP_*", "POTLUCK_*", "LD_PRELOAD")
"""Variables that lead uv to another environment, interpreter or index than the one that is meant:
``uv pip sync`` removes whatever else it finds in its target."""
_OF_THE_USER = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_*", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
    *("UV_EXCLUDE_NEWER", "UV_KEYRING_PROVIDER", "UV_HTTP_TIMEOUT", "UV_NATIVE_TLS"),
    *("UV_SYSTEM_CERTS", "UV_INSECURE_HOST", "UV_PYTHON_INSTALL_MIRROR", "UV_PYTHON_DOWNLOADS*"),
)
"""Where packages and interpreters come from, for the user that runs potluck."""
_MAX_OUTPUT, _MAX_SAID = 64 << 20, 8192


def variables(given: Mapping[str, str], *, as_user: bool) -> dict[str, str]:
    """The variables of uv: those of this process that lead it nowhere else, and ``given``.
    ``as_user``: it asks the indexes that this user has set."""

    def is_kept(name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in _OF_THE_USER):
            return as_user
        return not any(fnmatchcase(name, pattern) for pattern in _DROPPED)

    kept = {name: value for name, value in os.environ.items() if is_kept(name)}
    return {**kept, "NO_COLOR": "1", **given}


async def run_uv(
    words: Sequence[str],
    *,
    directory: Path,
    given: Mapping[str, str],
    as_user: bool = False,
    lock: int = -1,
) -> tuple[str, str]:
    """Run uv in ``directory``, as ``run`` does."""
    import uv

    environ = variables(given, as_user=as_user)
    return await run([uv.find_uv_bin(), *words], directory=directory, environ=environ, lock=lock)


async def run(
    command: Sequence[str],
    *,
    directory: Path,
    environ: Mapping[str, str] | None = None,
    lock: int = -1,
) -> tuple[str, str]:
    """Run ``command`` in ``directory``; what it wrote to stdout and stderr, of stdout the first
    64 MiB, of stderr the last 8 KiB. Cancelled, it is killed
    with all that it started. If this process is killed meanwhile, it holds on to the ``lock``, a
    descriptor.

    ConfigurationError, in its own words, if it fails.
    """
    need_posix("making an environment")
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        pass_fds=() if lock < 0 else (lock,),
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = await asyncio.gather(
            _read(process.stdout, first=_MAX_OUTPUT), _read(process.stderr, last=_MAX_SAID)
        )
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, SIGKILL)
            await process.wait()
    text, said = out.decode(errors="replace"), err.decode(errors="replace")
    if process.returncode != 0:
        code = f"{command[0]} ended with code {process.returncode}"
        raise ConfigurationError(in_short(said) or code)
    return text, said


async def _read(pipe: asyncio.StreamReader, *, first: int = 0, last: int = 0) -> bytes:
    """All that comes out of ``pipe``: the ``first`` bytes of it, and the ``last``."""
    kept = bytearray()
    while block := await pipe.read(1 << 16):
        kept += block
        del kept[first : max(first, len(kept) - last)]
    return bytes(kept)


_CAUSE = re.compile(r"(?m)^(?:error|  cause|  ├─▶|  ╰─▶|hint): ?")


def in_short(said: str) -> str:
    """What uv wrote about a failure, in one line."""
    kept = [line for line in said.splitlines() if not line.startswith(("warning:", "Using "))]
    return plain(" ".join(_CAUSE.sub("", "\n".join(kept)).split()))[:2000]


def warnings_in(said: str) -> list[str]:
    """The warnings that uv wrote, such as that of a yanked package."""
    lines = said.splitlines()
    return [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
