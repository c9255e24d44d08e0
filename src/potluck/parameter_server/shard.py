"""``Shard``: the tensors of all models that lie on one server. Pure: no lock, no clock, no I/O.

Workers stage gradients on it; entries of the log (``entries.py``) say what becomes of them. So all
servers have the same versions, each of its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from potluck.errors import ProtocolError
from potluck.parameter_server.entries import Drop, Entry, Grant, Leave, SetParameters, Update
from potluck.parameter_server.layout import (
    Layout,
    Tensors,
    check_layout,
    checked,
    layout_of,
    of_plain,
    plain,
)
from potluck.parameter_server.model import LIFE_BITS
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.placement import holders
from potluck.parameter_server.table import Table

MAX_STAGED = 4
"""Gradients of one worker for one model, and models whose first parameters it gives, that the log
has not reached yet."""


class Shard:
    """The part of ``server``, one of ``servers``, ``copies`` of which have each tensor."""

    def __init__(
        self, optimizer: Optimizer, server: str, servers: tuple[str, ...], copies: int = 1
    ) -> None:
        self._optimizer = optimizer
        self._server = server
        self._servers = servers
        self._copies = copies
        self._layouts: dict[str, Layout] = {}
        self._tables: dict[str, Table] = {}
        self._staged: dict[tuple[str, str], dict[int, Tensors]] = {}
        """By model and worker, in the order of arrival: by push number."""
        self._granted: dict[tuple[str, str], tuple[int, Tensors]] = {}
        """By model and worker: a version to be fetched, and its number."""

    # -- workers

    def stage(
        self,
        model: str,
        worker: str,
        push: int,
        tensors: Tensors,
        what: str,
        layout: Layout | None = None,
    ) -> bool:
        """Keep ``tensors`` until the log says what becomes of them; a repeat changes nothing.
        ``layout`` is that of a model which may be unknown here.

        False if there is no room. ValueError for tensors that are not those of the model here;
        ``what`` names them.
        """
        known = self._layouts.get(model)
        layout = known or layout
        if layout is None:
            raise ValueError(f"{what}: there is no such model. Call set_parameters first")
        tensors = checked(tensors, layout, self._names_here(layout), what)
        staged = self._staged.get((model, worker), {})
        if push in staged:
            return True
        if known and len(staged) == MAX_STAGED:
            oldest = next(iter(staged))
            if oldest >> LIFE_BITS == push >> LIFE_BITS:
                return False
            del staged[oldest]  # its worker was killed before it pushed it
        elif not known and len(self._first_parameters(worker)) >= MAX_STAGED:
            return False
        self._staged.setdefault((model, worker), {})[push] = tensors
        return True

    def is_staged(self, model: str, worker: str, push: int, layout: Layout | None = None) -> bool:
        """Whether what lies here of a push has come. ``layout`` as for ``stage``."""
        layout = self._layouts.get(model) or layout or {}
        return push in self._staged.get((model, worker), {}) or not self._names_here(layout)

    def tensors(self, model: str) -> Tensors:
        """The newest version, immutable."""
        return self._tables[model].tensors

    def fetch(self, model: str, worker: str, version: int, names: Iterable[str]) -> Tensors | None:
        """Of the version that was granted to ``worker`` the tensors ``names``, once; None if the
        log has no such grant yet. ValueError for a tensor that is not here."""
        granted = self._granted.get((model, worker))
        if granted is None or granted[0] != version:
            return None
        for name in names:
            if name not in granted[1]:
                raise ValueError(f"server {self._server} has no tensor {name!r:.80} of {model!r}")
        del self._granted[model, worker]
        return {name: granted[1][name] for name in names}

    # -- the log

    def carry_out(self, entry: Entry) -> None:
        """One decision of the first server. ProtocolError if it names tensors that are not here:
        then this server has lost some."""
        match entry:
            case SetParameters(model, layout, worker, push):
                self._set(model, layout, self._take(model, layout, worker, push))
            case Update(model, how, pushes, rate, alpha=alpha):
                layout = self._layouts[model]
                gradients = [self._take(model, layout, *each) for each in pushes]
                table = self._tables[model]
                if how == "step":
                    table.step(gradients, rate)
                elif how == "mix":
                    table.mix(gradients[0], alpha, rate)
                else:
                    table.add(gradients[0])
            case Drop(model, worker, push):
                self._staged.get((model, worker), {}).pop(push, None)
            case Grant(model, worker, version):
                self._granted[model, worker] = version, self._tables[model].tensors
            case Leave(worker):
                # What it has staged may still be a gradient that counts.
                for key in [key for key in self._granted if key[1] == worker]:
                    del self._granted[key]

    # -- for checkpoints and for other servers

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, by model: not what is staged, which workers push again."""
        return {
            name: {"layout": plain(self._layouts[name]), "table": table.state()}
            for name, table in self._tables.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as ``state`` says; what is staged or granted is forgotten."""
        self._layouts = {name: of_plain(each["layout"]) for name, each in state.items()}
        self._tables = {
            name: Table.of_state(each["table"], self._optimizer) for name, each in state.items()
        }
        self.forget_staged()

    def names(self, model: str) -> dict[str, int]:
        """The bytes of each tensor of ``model`` that lies here, by name."""
        return {name: each.nbytes for name, each in self._tables[model].tensors.items()}

    def names_on(self, server: str, layout: Iterable[str]) -> list[str]:
        """Which tensors of ``layout`` lie on ``server``."""
        return [n for n in layout if server in holders(n, self._servers, self._copies)]

    def part(self, model: str, names: Iterable[str]) -> dict[str, Any]:
        """Of ``state`` the tensors ``names`` of one model, for another server."""
        return self._tables[model].part(names)

    def take(self, model: str, layout: Layout, part: Mapping[str, Any]) -> None:
        """Add a ``part`` of another server to what lies here. ValueError for tensors of another
        server's, or other shapes."""
        here, given = set(self._names_here(layout)), layout_of(part["tensors"])
        known = {name: layout[name] for name in given if name in here}
        check_layout(given, known, f"a copy of {model!r}")
        self._layouts[model] = layout
        self._tables.setdefault(model, Table({}, self._optimizer)).take(part)

    def forget_staged(self) -> None:
        """Forget what workers staged or were granted: they begin again."""
        self._staged, self._granted = {}, {}

    # -- inside

    def _set(self, model: str, layout: Layout, tensors: Tensors) -> None:
        table = self._tables.get(model)
        if table is None:
            self._layouts[model] = layout
            self._tables[model] = Table(tensors, self._optimizer)
        else:  # staged before the model was known, perhaps: then in dtypes of its own
            own = self._layouts[model]
            table.replace(checked(tensors, own, self._names_here(own), f"what is set for {model}"))

    def _take(self, model: str, layout: Layout, worker: str, push: int) -> Tensors:
        staged = self._staged.get((model, worker), {})
        found = staged.get(push)
        if found is None:
            if self._names_here(layout):
                raise ProtocolError(
                    f"server {self._server} has no push {push} of worker {worker} for {model!r}"
                )
            return {}
        for each in list(staged):
            del staged[each]  # also what came before it: of a push that was never made
            if each == push:
                break
        return found

    def _first_parameters(self, worker: str) -> list[str]:
        return [
            model
            for (model, its), staged in self._staged.items()
            if its == worker and staged and model not in self._layouts
        ]

    def _names_here(self, layout: Layout) -> list[str]:
        return self.names_on(self._server, layout)
