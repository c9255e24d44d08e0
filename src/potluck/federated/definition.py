"""What a user writes: a client's function, a server's function, and the files that hold them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from potluck.errors import ConfigurationError
from potluck.federated.parameters import Parameters, Update

F = TypeVar("F", bound=Callable[..., Any])

ClientFunction = Callable[[Parameters, Mapping[str, Any]], Update]

_MARK = "_potluck_federated"


def client(function: F) -> F:
    """Mark the function that trains where the data is: ``train(parameters, config)`` returns an
    [Update][potluck.federated.Update].

    ``parameters`` are the global ones: a list or dict of NumPy arrays, for the function to change
    as it likes. ``config`` is the aggregation's, with ``round``, the number of the round, and
    ``seed``, a number of its own for each client and round. [site][potluck.federated.site] says
    which client this is, and where its data is.
    """
    return _marked(function, "client", 2)


def server(function: F) -> F:
    """Mark the function that leads the rounds: ``main(federation)``, with a
    [Federation][potluck.federated.Federation]."""
    return _marked(function, "server", 1)


def _marked(function: F, kind: str, num_arguments: int) -> F:
    if not inspect.isfunction(function):
        raise TypeError(f"@potluck.federated.{kind} marks a function, not {function!r}")
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        taken = {"client": "(parameters, config)", "server": "(federation)"}[kind]
        raise TypeError(
            f"@potluck.federated.{kind}: {function.__name__} must take {taken}"
        ) from None
    setattr(function, _MARK, kind)
    return function


@dataclass(frozen=True, slots=True)
class Site:
    """Where a client's function runs: the name of the ``client``, its ``index``, from 0 to
    ``num_clients - 1``, and its ``data_dir``, the folder of its data (None: none was given).

    On a cluster the run's clients are counted when it starts; the name is the number of the worker,
    from 1. A client that is started again has its index again; that of one that comes in later is
    above all others, and so is its ``num_clients``."""

    client: str
    index: int
    num_clients: int
    data_dir: Path | None


_site: ContextVar[Site] = ContextVar("potluck_federated_site")


def site() -> Site:
    """The present client's [Site][potluck.federated.Site]. ConfigurationError outside of a client's
    function."""
    try:
        return _site.get()
    except LookupError:
        raise ConfigurationError(
            "potluck.federated.site() is for a client's function, while it runs"
        ) from None


def at(place: Site, function: Callable[[], Update]) -> Update:
    """Call ``function`` as the client at ``place``."""
    token = _site.set(place)
    try:
        return function()
    finally:
        _site.reset(token)


def load(source: str | Path | Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The function of ``kind`` (``client`` or ``server``) in the file ``source``, which is run as a
    module; a function itself is returned as it is.

    ConfigurationError if there is no such file, or not exactly one such function in it. What the
    file raises is raised.
    """
    if callable(source):
        mark = getattr(source, _MARK, kind)
        if mark != kind:
            name = getattr(source, "__name__", repr(source))
            raise ConfigurationError(
                f"{name} is the {mark}'s function, and that of the {kind} is needed"
            )
        return source
    path = Path(source).absolute()
    if not path.is_file():
        raise ConfigurationError(f"the {kind}'s file {str(source)!r} does not exist")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        module = known
    else:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ConfigurationError(f"the {kind}'s file {path} is no Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        if known is None:
            sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    found = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, _MARK, None) == kind and value.__module__ == module.__name__
    }
    if len(found) != 1:
        have = ", ".join(sorted(found)) or "none"
        other = "server" if kind == "client" else "client"
        marks = {getattr(value, _MARK, None) for value in vars(module).values()}
        swapped = f". It has one with @potluck.federated.{other}" if other in marks else ""
        raise ConfigurationError(
            f"{path} must have one function with @potluck.federated.{kind}; it has: {have}{swapped}"
        )
    function: Callable[..., Any] = next(iter(found.values()))
    return function
