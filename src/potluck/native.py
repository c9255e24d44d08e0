"""The native core, if it is here: the one place that imports ``potluck._native``.

``available`` says whether it is, ``reason`` why not; ``core`` is the extension module. Code with a
native way and a Python way asks ``available`` once, when the work begins. The environment
variable ``POTLUCK_NATIVE`` chooses: ``0`` switches the core off, the path of an extension file
loads that build of it (how the sanitizers run), anything else means "if it is here". Importing
this module never fails and imports neither NumPy nor torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from potluck.version import VERSION

VARIABLE = "POTLUCK_NATIVE"

_REBUILD = "install potluck again (in a checkout: make native)"


class Loaded(NamedTuple):
    """The outcome of looking for the extension: the module, or why there is none."""

    module: ModuleType | None
    reason: str


def load(wanted: str) -> Loaded:
    """Look for the extension as the value ``wanted`` of POTLUCK_NATIVE says."""
    if wanted == "0":
        return Loaded(None, f"switched off by {VARIABLE}=0")
    try:
        module = _import(wanted)
    except ModuleNotFoundError as error:
        if error.name != "potluck._native":
            raise
        return Loaded(None, "it was not built: no working C++20 compiler was there")
    except (ImportError, OSError) as error:
        return Loaded(None, f"the extension is there but can't be loaded; {_REBUILD}: {error}")
    version = getattr(module, "version", "an unknown version")
    if version != VERSION:
        return Loaded(
            None,
            f"the extension is of version {version}, potluck of {VERSION}; {_REBUILD}",
        )
    return Loaded(module, "")


def describe() -> str:
    """One line for people: which engine runs, and with what."""
    if not available:
        return f"Python ({reason})"
    tls = "OpenSSL" if core.has_openssl else "no OpenSSL: TLS stays in Python"
    return f"native {core.version} ({', '.join([*core.cpu_features(), tls])})"


def _import(wanted: str) -> ModuleType:
    if "potluck._native" in sys.modules or not wanted.endswith((".so", ".pyd", ".dylib")):
        return importlib.import_module("potluck._native")
    spec = importlib.util.spec_from_file_location("potluck._native", wanted)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["potluck._native"] = module
    return module


if TYPE_CHECKING:
    import potluck._native as _extension

    core = _extension

    available: bool
    reason: str
else:
    core, reason = load(os.environ.get(VARIABLE, ""))
    available = core is not None
