"""What the script of a job needs: its imports, read from its text, or the environment that it asks
for, which is planned where the job starts, and sent as a package of one file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import msgspec

from potluck._core.cluster.code_store.imports import imported, needs_of, own_modules, wants_torch
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.environments.making import Environments
from potluck._core.cluster.environments.plan import Plan, decode_plan
from potluck._core.cluster.environments.planning import make_plan
from potluck._core.cluster.environments.sources import find_source
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import jobs
from potluck._core.wire.format import Versions
from potluck._core.wire.local import RunRequest

_FILE = "plan.json"


async def plan_of(
    request: RunRequest,
    kinds: Collection[str],
    environments: Environments,
    code_store: CodeStore,
    note: Callable[[str], None],
) -> bytes | None:
    """The package with the plan of the environment that the script of ``request`` asks for, for
    machines of ``kinds``; None if it asks for none. ``note`` gets lines about it.

    ConfigurationError if there is no such environment.
    """
    if request.is_installed:
        return None
    script = Path(request.folder or request.directory, request.script)
    root = Path(request.folder or request.root or script.parent)
    source = await asyncio.to_thread(find_source, root, script)
    if source is None:
        return None
    source = replace(source, builds=request.allows_builds)
    plan = await make_plan(
        source, kinds, folder=environments.root / "plans", index=environments.index, note=note
    )
    torches = {
        w.version.partition("+")[0] for p in plan.parts for w in p.wheels if w.name == "torch"
    }
    if len(torches) > 1:
        note(f"machines get torch {' and '.join(sorted(torches))}, which may round differently")
    num = max(len(part.wheels) for part in plan.parts)
    note(f"environment: Python {plan.python}, {num} packages from {source.label} and potluck")
    with tempfile.TemporaryDirectory(prefix="potluck-plan-") as made:
        Path(made, _FILE).write_bytes(plan.encode())
        package, _ = await code_store.take_in(Path(made), _FILE, ())
    return package


def read_plan(code_store: CodeStore, package: bytes) -> Plan:
    """The plan in ``package``, which is here. ProtocolError if it is none."""
    return decode_plan(code_store.read(package, _FILE))


def look_at(
    request: RunRequest,
) -> tuple[Versions, tuple[jobs.Need, ...], tuple[tuple[str, str], ...]]:
    """What the script of ``request`` needs: the versions that count, packages, and modules of the
    user's own that do not travel."""
    root = Path(request.folder or request.directory)
    files = [root / each for each in (request.script, *request.modules)]
    own = () if request.module else (each.parent for each in files)
    places = [*dict.fromkeys([*own, root, *(root / each for each in request.importable)])]
    names, versions = imported(files, places), own_versions()
    needs = needs_of(names) if request.folder else ()
    if request.folder and not wants_torch(needs):
        versions = msgspec.structs.replace(versions, torch="")
    return versions, needs, own_modules(names, places)
