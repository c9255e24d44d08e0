"""``potluck doctor``: the engine of this installation, and its optional packages."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer

from potluck._core import native
from potluck._core.optional import installed
from potluck.cli.terminal import print_json

_OPTIONAL = {"torch": "torch", "scikit-learn": "sklearn", "mpi4py": "mpi", "matplotlib": "bench"}
"""The extra that installs each optional package."""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show which engine is in use, native or Python, and which optional packages are installed.

    With --json: {"potluck", "python", "platform", "engine", "reason", "kernels", "cpu", "tls",
    "limits", "packages"}. ``engine`` is "native" or "python", ``reason`` why it is not native,
    ``kernels`` the instruction set of the arithmetic, ``cpu`` the features of the processor,
    ``tls`` the library that encrypts ("openssl" or "python"), ``limits`` what would hold workers to
    the limits of `potluck up`, ``packages`` the versions by name (null: not installed).
    """
    found = examine()
    if json:
        print_json(found)
        return
    typer.echo(f"potluck {found['potluck']}, Python {found['python']}, {found['platform']}")
    typer.echo(f"{'engine':<12}  {native.describe()}")
    if native.advice():
        typer.echo(f"{'':<12}  {native.advice()}")
    if native.available:
        typer.echo(f"{'kernels':<12}  {found['kernels']}")
    typer.echo(f"{'limits':<12}  {found['limits']}")
    for name, version in found["packages"].items():
        wanted = f"not installed: pip install 'potluck[{_OPTIONAL[name]}]'"
        typer.echo(f"{name:<12}  {version or wanted}")


def examine() -> dict[str, Any]:
    """The fields of ``--json``, as the help of the command lists them."""
    return {
        "potluck": installed("potluck"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "engine": "native" if native.available else "python",
        "reason": native.reason,
        "kernels": native.core.kernel_set() if native.available else "numpy",
        "cpu": native.core.cpu_features() if native.available else [],
        "tls": "openssl" if native.available and native.core.has_openssl else "python",
        "limits": _limits(),
        "packages": {name: installed(name) or None for name in _OPTIONAL},
    }


def _limits() -> str:
    """What would hold workers to ``potluck up --cpus`` and ``--memory`` on this machine."""
    from potluck._core.cluster.sharing.cgroups import find_parent

    parent = find_parent()
    if isinstance(parent, str):
        return f"of each worker, not enforced for shared memory ({parent})"
    return f"by a control group below {parent}"
