"""Optional packages: import them, or raise an error with the pip command that installs them."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

from potluck.errors import MissingDependency


def installed(package: str) -> str:
    """The version of an installed package, without importing it; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def require(module: str, extra: str, also: str = "") -> ModuleType:
    """Import and return ``module``, which ``pip install 'potluck[extra]'`` installs.

    ``also`` is added to the error, for requirements that pip can't install. MissingDependency if
    the package is not installed. If an installed package fails while it is imported, its own error
    is raised.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependency(
            f"this needs the Python package {module.split('.')[0]!r}, which is not installed: "
            f"pip install 'potluck[{extra}]'{also}",
            name=error.name,
        ) from None
