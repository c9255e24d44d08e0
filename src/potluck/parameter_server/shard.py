"""``Shard``: the tensors of all models on one server, a ``Table`` for each model. Pure: no lock, no
clock, no I/O.

Workers stage gradients on a shard; entries of the log say what becomes of them. So all servers have
the same versions, each of its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from potluck.errors import ProtocolError
from potluck.parameter_server.layout import (
    Array,
    Layout,
    Tensors,
    check_layout,
    checked,
    holders,
    layout_of,
    of_plain,
    plain,
)
from potluck.parameter_server.log import Drop, Entry, Grant, Leave, SetParameters, Update
from potluck.parameter_server.model import LIFE_BITS
from potluck.parameter_server.optimizers import Optimizer, State

MAX_STAGED = 4
"""Limits, per worker, of what no entry has named yet: gradients for one model, and models with
first parameters."""


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
        """Keep ``tensors`` until an entry names them; a repeat changes nothing. ``layout``: of a
        model that may be unknown here.

        False if there is no room. ValueError, which begins with ``what``, for tensors that do not
        fit the model's part here.
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
        """Whether this server's part of a push is staged. ``layout`` as for ``stage``."""
        layout = self._layouts.get(model) or layout or {}
        return push in self._staged.get((model, worker), {}) or not self._names_here(layout)

    def tensors(self, model: str) -> Tensors:
        """The newest version, immutable."""
        return self._tables[model].tensors

    def fetch(self, model: str, worker: str, version: int, names: Iterable[str]) -> Tensors | None:
        """The tensors ``names`` of the version granted to ``worker``, once; None without such a
        grant. ValueError for a tensor that is not here."""
        granted = self._granted.get((model, worker))
        if granted is None or granted[0] != version:
            return None
        for name in names:
            if name not in granted[1]:
                raise ValueError(f"server {self._server} has no tensor {name!r:.80} of {model!r}")
        del self._granted[model, worker]
        return {name: granted[1][name] for name in names}

    # -- the log

    def apply(self, entry: Entry) -> None:
        """Apply a decision of the primary. ProtocolError if it names tensors that are not staged
        here: then this server has lost some."""
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
                # Its staged gradients may still count.
                for key in [key for key in self._granted if key[1] == worker]:
                    del self._granted[key]

    # -- for checkpoints and for other servers

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, by model: not staged tensors, which workers push again."""
        return {
            name: {"layout": plain(self._layouts[name]), "table": table.state()}
            for name, table in self._tables.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``; staged tensors and grants are forgotten."""
        self._layouts = {name: of_plain(each["layout"]) for name, each in state.items()}
        self._tables = {
            name: Table.of_state(each["table"], self._optimizer) for name, each in state.items()
        }
        self.forget_staged()

    def names_on(self, server: str, layout: Iterable[str]) -> list[str]:
        """The tensors of ``layout`` that belong on ``server``."""
        return [n for n in layout if server in holders(n, self._servers, self._copies)]

    def part(self, model: str, names: Iterable[str]) -> dict[str, Any]:
        """Of ``state`` the tensors ``names`` of one model, for another server."""
        return self._tables[model].part(names)

    def install(self, model: str, layout: Layout, part: Mapping[str, Any]) -> None:
        """Add a ``part`` of another server. ValueError for tensors that do not belong here, or
        other shapes."""
        here, given = set(self._names_here(layout)), layout_of(part["tensors"])
        known = {name: layout[name] for name in given if name in here}
        check_layout(given, known, f"a copy of {model!r}")
        self._layouts[model] = layout
        self._tables.setdefault(model, Table({}, self._optimizer)).install(part)

    def forget_staged(self) -> None:
        """Forget staged tensors and grants: workers begin again."""
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


class Table:
    """The newest version of a model's tensors, and what its optimizer keeps.

    A version is never changed: an update makes new arrays. So a reply or a checkpoint of a version
    needs no copy, and can't mix two of them.
    """

    def __init__(self, tensors: Tensors, optimizer: Optimizer) -> None:
        self.tensors = frozen(tensors)
        self._optimizer = optimizer
        self._states: dict[str, State] = {}
        self._num_steps = 0
        self._mixed: Tensors | None = None

    # -- updates, each to a new version

    def step(self, gradients: Sequence[Tensors], rate: float) -> None:
        """A step of the optimizer by the mean of ``gradients``, added in this order, at a learning
        rate of ``rate``."""
        self._step({name: mean([each[name] for each in gradients]) for name in self.tensors}, rate)

    def mix(self, gradient: Tensors, alpha: float, rate: float) -> None:
        """A step by ``alpha * gradient + (1 - alpha) * before``, which is kept for the next one."""
        before = self._mixed
        if before is not None:
            gradient = {
                name: each.dtype.type(alpha) * each + each.dtype.type(1 - alpha) * before[name]
                for name, each in gradient.items()
            }
        self._mixed = frozen(gradient)
        self._step(gradient, rate)

    def add(self, differences: Tensors) -> None:
        """Add ``differences`` to the tensors."""
        self.tensors = frozen({n: each + differences[n] for n, each in self.tensors.items()})

    def replace(self, tensors: Tensors) -> None:
        """Take ``tensors`` instead, and forget what the optimizer kept."""
        self.tensors, self._states, self._num_steps = frozen(tensors), {}, 0
        self._mixed = None

    def _step(self, gradient: Tensors, rate: float) -> None:
        self._num_steps += 1
        tensors: dict[str, Array] = {}
        states: dict[str, State] = {}
        for name, tensor in self.tensors.items():
            tensors[name], state = self._optimizer.step(
                tensor, gradient[name], self._states.get(name, {}), self._num_steps, rate
            )
            states[name] = frozen(state)
        self.tensors, self._states = frozen(tensors), states

    # -- for checkpoints

    def state(self) -> dict[str, Any]:
        """All of it, as a checkpoint holds it."""
        mixed = None if self._mixed is None else dict(self._mixed)
        return {
            "tensors": dict(self.tensors),
            "optimizer": {name: dict(state) for name, state in self._states.items()},
            "num_steps": self._num_steps,
            "mixed": mixed,
        }

    def part(self, names: Iterable[str]) -> dict[str, Any]:
        """Of ``state`` the tensors ``names``."""
        state, wanted = self.state(), set(names)
        for each in ("tensors", "optimizer", "mixed"):
            if state[each] is not None:
                state[each] = {n: value for n, value in state[each].items() if n in wanted}
        return state

    def install(self, part: Mapping[str, Any]) -> None:
        """Add a ``part`` of another table of the same model and version."""
        self.tensors = frozen({**self.tensors, **part["tensors"]})
        self._states |= part["optimizer"]
        self._num_steps = part["num_steps"]
        if part["mixed"] is not None:
            self._mixed = {**(self._mixed or {}), **part["mixed"]}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], optimizer: Optimizer) -> Table:
        """The inverse of ``state``."""
        table = cls(state["tensors"], optimizer)
        table._states = dict(state["optimizer"])
        table._num_steps, table._mixed = state["num_steps"], state["mixed"]
        return table


def mean(arrays: Sequence[Array]) -> Array:
    """The mean, added in this order and then divided: what an ``all_reduce`` over a centralized
    plan gives, bit by bit."""
    if len(arrays) == 1:
        return arrays[0]
    total = arrays[0] + arrays[1]
    for each in arrays[2:]:
        total += each
    total /= total.dtype.type(len(arrays))
    return total


def frozen(tensors: Tensors) -> Tensors:
    """``tensors`` as they are, but read-only from now on.

    NumPy's arithmetic returns a scalar, not an array, where all operands have no dimensions; here
    these become arrays again."""
    arrays = {name: np.asarray(each) for name, each in tensors.items()}
    for each in arrays.values():
        each.flags.writeable = False
    return MappingProxyType(arrays)
