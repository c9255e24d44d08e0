"""The variables of workers: which ones of an agent's environment they get, and ``MASTER_PORT``.

A worker runs a script that any member of the cluster may have sent. So an agent of ``potluck up``
passes on a list of variables that programs need to run, and none that prove the identity of the
machine's owner. The agent of a single ``potluck run`` starts the user's own script for the user:
its workers get the whole environment."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from potluck.errors import ConfigurationError

_PASSED = (
    # the account, the language, the time zone
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM"),
    # programs, libraries and Python
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "PYTHON*", "VIRTUAL_ENV", "CONDA_*"),
    *("MALLOC_*", "GLIBC_TUNABLES", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    # threads
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "VECLIB_*"),
    "TOKENIZERS_PARALLELISM",
    # accelerators and the libraries that drive them
    *("CUDA_*", "NVIDIA_*", "CUBLAS_*", "CUDNN_*", "NCCL_*", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*"),
    *("AMD_*", "MIOPEN_*", "ZE_*", "ONEAPI_*", "XLA_*", "GLOO_*", "UCX_*"),
    *("PYTORCH_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "ACCELERATE_*"),
    # where data sets, models and compiled kernels are kept
    *("XDG_CACHE_HOME", "HF_HOME", "HF_*_CACHE", "HF_*_OFFLINE", "TRANSFORMERS_CACHE"),
    *("KERAS_HOME", "NLTK_DATA", "MPLCONFIGDIR", "MPLBACKEND"),
    "POTLUCK_*",
)
"""Not on the list: ranks of Slurm and MPI, because potluck gives workers their ranks, and proxies,
which may hold a password."""

_SECRET = re.compile(
    r"(?:^|_)(?:API|ACCESS|AUTH)?(?:TOKENS?|KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PSK"
    r"|CREDENTIALS?|AUTH|COOKIE|JWT)(?:_|$)"
)
"""Parts of names of secrets, however the name begins."""
_NEVER = frozenset({"POTLUCK_PSK", "POTLUCK_PASSPHRASE"})
"""Variables that a worker never gets from its agent, not by --env either."""
_NOT_PASSED = _NEVER | {"POTLUCK_HOME"}
"""And what leads to the owner's files, for the owner's own scripts only."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = re.compile(
    r"POTLUCK_(?!PLAN$).*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_RESTART_COUNT"
)


def passed_on(environment: Mapping[str, str], also: str) -> dict[str, str]:
    """The part of ``environment`` that workers of other members' jobs get. ``also`` is the owner's
    addition (POTLUCK_PASS_ENV): names, and prefixes as in ``SLURM_*``, with commas between.

    A name that looks like one of a secret must be written out in ``also``: no pattern covers it.
    """
    more = [name.strip() for name in also.split(",") if name.strip()]

    def is_passed(name: str) -> bool:
        if name in _NOT_PASSED or name in more:
            return name not in _NOT_PASSED
        if _SECRET.search(name.upper()):
            return False
        return any(fnmatchcase(name, pattern) for pattern in (*_PASSED, *more))

    return {name: value for name, value in environment.items() if is_passed(name)}


def all_but_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a user's own workers, without the cluster's secret."""
    return {name: value for name, value in environment.items() if name not in _NEVER}


def given_variables(
    texts: Iterable[str], environment: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """The variables that ``potluck run --env`` names: ``NAME=VALUE``, or ``NAME`` for the value in
    ``environment``. ConfigurationError if one can't be given to workers."""
    found = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"--env {text!r}: write NAME=VALUE, or NAME to take it along")
        if _OWN.fullmatch(name):
            raise ConfigurationError(f"--env {name}: potluck sets this variable itself")
        if not has_value and name not in environment:
            raise ConfigurationError(f"--env {name}: it is not set here; write {name}=VALUE")
        if "\0" in value:
            raise ConfigurationError(f"--env {name}: its value has a NUL character")
        found[name] = value if has_value else environment[name]
    return tuple(found.items())


def accepted(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The variables of a job's sender that a machine gives to its workers: no sender may replace
    what potluck sets, or what the machine's owner limits."""
    return {name: value for name, value in given if _NAME.fullmatch(name) and not _is_own(name)}


def _is_own(name: str) -> bool:
    return _OWN.fullmatch(name) is not None


_PORTS = range(20_000, 32_768)
"""Systems give none of these to programs that ask for any port: they begin at 32768 on Linux, at
49152 on macOS and Windows. A script listens seconds after its port was chosen."""
_NUM_TRIES = 64


def free_port() -> int:
    """A port on which nobody listens, at any IPv4 address of this machine: of ``_PORTS``, or any if
    all that were tried are taken. OSError if there is none."""
    for port in (*random.SystemRandom().sample(_PORTS, _NUM_TRIES), 0):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            found: int = sock.getsockname()[1]
            return found
    raise OSError("this machine has no free port")
