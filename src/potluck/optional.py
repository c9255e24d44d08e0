"""Optional packages: import them, or say in one sentence which pip command brings them."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

from potluck.errors import MissingDependency


def installed(package: str) -> str:
    """The version of a package that is installed, which is not imported; empty if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def require(module: str, extra: str, also: str = "") -> ModuleType:
    """Import and return ``module``, which comes with ``pip install 'potluck[extra]'``.

    ``also`` says what pip can't bring.

    Raises MissingDependency when the package is not installed. A package that is installed but
    breaks while it is imported raises its own error, which says more than ours could.
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
