"""Import large packages without the garbage collector: a third less processor time for each of the
hundreds of processes that tests start.

Importing torch makes 300,000 objects that stay. Python's collector traverses them some ten times
during the import, at each full collection afterwards, and at exit. ``install`` turns it off during
such an import, and on again at its end. Imports at the top level of modules end with
``gc.freeze()``, which exempts what they made; nothing but modules has run by then, so all that a
test is about is collected as ever.

pytest sets ``VARIABLE`` for the processes of tests; a file in .venv (``tools/environment``) then
calls ``install`` at their start. Benchmarks and scripts run by hand are left alone.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType

VARIABLE = "PYTHON_QUIET_IMPORTS"
"""A name that agents pass on to workers of other machines, as all of PYTHON*."""

PACKAGES = frozenset({"accelerate", "datasets", "lightning", "sklearn", "torch", "transformers"})


class QuietImports(MetaPathFinder):
    """Finds modules of ``PACKAGES`` as Python does, and wraps their loading."""

    def __init__(self) -> None:
        self._is_importing = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that no other quiet import asks for; None for all others."""
        if self._is_importing or fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_quietly(module: ModuleType) -> None:
            if self._is_importing or not gc.isenabled():
                load(module)
                return
            self._is_importing = True
            gc.disable()
            try:
                load(module)
            finally:
                if is_at_top_level(sys._getframe(1)):
                    gc.freeze()
                gc.enable()
                self._is_importing = False

        vars(spec.loader)["exec_module"] = load_quietly
        return spec


def is_at_top_level(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs for import statements of modules only, and for no call."""
    while frame is not None:
        code = frame.f_code
        if code.co_name != "<module>" and not code.co_filename.startswith("<frozen "):
            return False
        frame = frame.f_back
    return True


ZYGOTE = "PYTHON_ZYGOTE"
"""The variable with the socket of the process that forks others (``zygote.py``)."""

STACKS = "PYTHON_STACKS"
"""The variable with a file into which SIGUSR2 writes the stacks of all threads."""


def install() -> None:
    """Make the imports of this process quiet, and do what the variables ask for."""
    sys.meta_path.insert(0, QuietImports())
    follow_environment()


def follow_environment() -> None:
    """Have SIGUSR2 show the stacks of this process, and its own starts of processes quick, if the
    variables say so."""
    if sys.platform == "win32":
        return
    if os.environ.get(STACKS):
        import faulthandler
        import signal

        # The file stays open as long as the process.
        faulthandler.register(signal.SIGUSR2, open(os.environ[STACKS], "w"))  # noqa: SIM115
    if sys.platform == "linux" and os.environ.get(ZYGOTE):
        from support import forked

        forked.install()
