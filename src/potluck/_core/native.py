"""The native core: the one place that imports the extension ``potluck._core._native``.

``available`` says whether the core was loaded, ``reason`` why not; ``core`` is the extension.
Code that has a native and a Python implementation asks ``available`` once, when its work begins.
The environment variable ``POTLUCK_NATIVE`` chooses: ``0`` switches the core off, the path of an
extension file loads that build (as the sanitizers do), anything else loads the core if it is built.

This module raises ImportError if the extension was built from other sources than the Python files,
because a later call would fail at changed arguments. To find out, the extension holds the hash of
the stub ``_native.pyi`` at the time of the build; the stub lists all functions and arguments. A
change in C++ that leaves the stub as it is goes unnoticed. Neither NumPy nor torch is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from potluck._core.version import VERSION

VARIABLE = "POTLUCK_NATIVE"

_NOT_BUILT = "it was not built: no working C++20 compiler was there"
_REBUILD = "install potluck again (in a checkout: make native)"


def interface() -> str:
    """The SHA-256 of the stub of these Python files, as native/build/CMakeLists.txt computes it."""
    return sha256(Path(__file__).with_name("_native.pyi").read_bytes()).hexdigest()


class Loaded(NamedTuple):
    """The outcome of loading the extension: the module, or None and the reason."""

    module: ModuleType | None
    reason: str


def load(wanted: str) -> Loaded:
    """Load the extension as ``wanted``, a value of POTLUCK_NATIVE, asks.

    ImportError if the extension was built from other sources than these Python files.
    """
    if wanted == "0":
        return Loaded(None, f"switched off by {VARIABLE}=0")
    try:
        module = _import(wanted)
    except ModuleNotFoundError as error:
        if error.name != "potluck._core._native":
            raise
        return Loaded(None, _NOT_BUILT)
    except (ImportError, OSError) as error:
        return Loaded(None, f"the extension is there but can't be loaded; {_REBUILD}: {error}")
    if (getattr(module, "version", ""), getattr(module, "interface", "")) != (VERSION, interface()):
        raise ImportError(
            f"{module.__file__} was built from other sources than the Python files of potluck "
            f"{VERSION} in {Path(__file__).parent}; {_REBUILD}, or set {VARIABLE}=0 to run on the "
            "Python engine"
        )
    return Loaded(module, "")


def advice() -> str:
    """What to do about an engine that nobody switched off and that was not built; else empty."""
    if reason != _NOT_BUILT:
        return ""
    return (
        f"links and arithmetic run on the slower Python engine, since the native core is missing: "
        f"{reason}. Install one (Debian, Ubuntu: apt-get install g++; macOS: xcode-select "
        "--install), then potluck again"
    )


def describe() -> str:
    """The engine of this process in one line: native with its CPU features and TLS, or Python."""
    if not available:
        return f"Python ({reason})"
    tls = "OpenSSL" if core.has_openssl else "no OpenSSL: TLS stays in Python"
    return f"native {core.version} ({', '.join([*core.cpu_features(), tls])})"


def _import(wanted: str) -> ModuleType:
    if "potluck._core._native" in sys.modules or not wanted.endswith((".so", ".pyd", ".dylib")):
        return importlib.import_module("potluck._core._native")
    spec = importlib.util.spec_from_file_location("potluck._core._native", wanted)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["potluck._core._native"] = module
    return module


if TYPE_CHECKING:
    import potluck._core._native as _extension

    core = _extension

    available: bool
    reason: str
else:
    core, reason = load(os.environ.get(VARIABLE, ""))
    available = core is not None
