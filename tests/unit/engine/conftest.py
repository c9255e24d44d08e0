"""The state machines of both progress loops: a test that takes ``twin`` runs on each of them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from potluck._core import native
from potluck._core.engine.arrays.layout import Buffers
from potluck._core.engine.failures.group_errors import GroupState
from potluck._core.engine.loop import connections, flow_control, mailbox, plans, running
from potluck._core.engine.loop.running import CompiledPlan, as_bytes
from potluck._core.engine.work import Work
from potluck._core.metrics import LinkMeter
from potluck._core.transport.link import Link
from potluck._core.types import Group, Member
from potluck._core.wire.frames import Frame, Kind

CHECKOUT = Path(__file__).parents[3]


def _load_machines() -> ModuleType | None:
    """``potluck._native_testing``, from beside the extension that is in use."""
    if not native.available or native.core.__file__ is None:
        return None
    folder = Path(native.core.__file__).parent
    found = sorted(folder.glob("_native_testing.*"))
    if not found:
        assert CHECKOUT not in folder.parents, "the native state machines are missing: make native"
        return None
    spec = importlib.util.spec_from_file_location("_native_testing", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_machines: Any = _load_machines()


class _Control:
    def __init__(self, core: Any) -> None:
        self.append = core.push_control


class _NativeConnection:
    """The native connection, with the methods of the Python one."""

    def __init__(self, rank: int, link: Link, _: object) -> None:
        self._core = _machines.Connection(rank, link)
        self.control = _Control(self._core)
        self.meter = self._core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def write(self, source: Any) -> bool:
        return bool(self._core.write(lambda: source(self)))

    def read(self, route: Any) -> bool:
        return bool(self._core.read(lambda frame: route(self, frame)))


class _PythonConnections:
    """The Python connections of a group, as `native/testing/connections.cpp` shows the native."""

    def __init__(self, epoch: int, world_size: int, max_early_bytes: int) -> None:
        members = tuple(Member(str(rank)) for rank in range(world_size))
        self._state = GroupState(Group(epoch, 0, members))
        self.wanted: list[int] = []
        self.held: list[int] = []
        connector: Any = SimpleNamespace(request=self.wanted.append)
        self._all = connections.Connections(
            self._state,
            connector,
            max_early_bytes=max_early_bytes,
            meter=lambda _: LinkMeter(),
            pending=lambda: (),
            on_hold=self.held.append,
            wake=lambda _: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)

    def move(self, route: Any, source: Any) -> None:
        def routed(link: connections.Connection, frame: Frame) -> connections.Sink:
            if frame.kind is Kind.CLOSE:
                link.has_closed = True
            return connections.Sink(*route(link.rank, frame))

        self._all.move(routed, lambda link: source(link.rank))

    def pause(self, rank: int) -> None:
        self._all.paused.add(rank)

    def can_read(self, rank: int) -> None:
        self._all.ready.add(rank)

    def can_write(self, rank: int) -> None:
        self._all.dirty.add(rank)

    def has_link(self, rank: int) -> bool:
        return rank in self._all.by_rank

    @property
    def failure(self) -> tuple[int, str] | None:
        error = self._state.error
        return None if error is None else (error.rank, str(error.__cause__))


@dataclass(frozen=True)
class _NativeSegment:
    core: Any
    chunk: int
    number: int
    data: np.ndarray


class _NativePlan:
    """The native plan under way, with the methods of the Python one."""

    def __init__(self, compiled: CompiledPlan, buffers: Buffers, sequence: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "core", _machines)
            plan = compiled.native
        self._dtype = compiled.dtype
        self._core = _machines.RunningPlan(plan, sequence, *buffers, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __str__(self) -> str:
        return str(self._core)

    @property
    def send_peers(self) -> tuple[int, ...]:
        return tuple(self._core.send_peers)

    @property
    def receive_peers(self) -> tuple[int, ...]:
        return tuple(self._core.receive_peers)

    def next_send(self, peer: int) -> _NativeSegment | None:
        return self._segment(self._core.next_send(peer))

    def next_receive(self, peer: int) -> _NativeSegment | None:
        return self._segment(self._core.next_receive(peer))

    def issue(self, peer: int, segment: _NativeSegment) -> None:
        self._core.issue(peer, segment.core)

    def sent(self, segment: _NativeSegment) -> None:
        self._core.sent(segment.core)

    def is_ready(self, segment: _NativeSegment) -> bool:
        return bool(self._core.is_ready(segment.core))

    def combines(self, segment: _NativeSegment) -> bool:
        return bool(self._core.combines(segment.core))

    def arrived(self, peer: int, segment: _NativeSegment) -> None:
        self._core.arrived(peer, segment.core)

    def apply(self, segment: _NativeSegment, payload: Any) -> None:
        self._core.apply(segment.core, payload)

    def needs(self, peer: int) -> bool:
        return self._core.missing({peer}) == peer

    def _segment(self, core: Any) -> _NativeSegment | None:
        if core is None:
            return None
        memory = core.memory
        data = np.frombuffer(memory, self._dtype) if len(memory) else np.empty(0, self._dtype)
        return _NativeSegment(core, self._core.chunk_of(core), core.number, data)


def _python() -> SimpleNamespace:
    def receiving(
        source: int, channel: int, ranks: tuple[int, ...], tag: int, dtype: int, array: Any
    ) -> mailbox.Receiving:
        return mailbox.Receiving(
            source, channel, ranks, tag, dtype, array, as_bytes(array), Work("recv"), 0.0
        )

    def sending(
        peer: int, channel: int, tag: int, dtype: int, number: int, array: Any
    ) -> mailbox.Sending:
        return mailbox.sending(peer, channel, tag, dtype, number, array, Work("send"), 0.0)

    def add_sending(box: mailbox.Mailbox, item: mailbox.Sending) -> None:
        box.sending[item.number] = item

    def run(compiled: CompiledPlan, buffers: Buffers, sequence: int) -> running.RunningPlan:
        work = Work("test")
        return running.RunningPlan(compiled, buffers, sequence=sequence, deadline=0.0, work=work)

    return SimpleNamespace(
        run=run,
        FlowControl=flow_control.FlowControl,
        FRAME_OVERHEAD=flow_control.FRAME_OVERHEAD,
        HangCheck=plans.HangCheck,
        HangDetector=plans.HangDetector,
        Mailbox=mailbox.Mailbox,
        Arrived=mailbox.Arrived,
        fits=mailbox.fits,
        receiving=receiving,
        sending=sending,
        add_sending=add_sending,
        Connection=connections.Connection,
        BUDGET=connections.BUDGET,
        Connections=_PythonConnections,
    )


def _native() -> SimpleNamespace:
    def receiving(
        source: int, channel: int, ranks: tuple[int, ...], tag: int, dtype: int, array: Any
    ) -> Any:
        return _machines.Receiving(source, channel, ranks, tag, dtype, as_bytes(array))

    def sending(peer: int, channel: int, tag: int, dtype: int, number: int, array: Any) -> Any:
        return _machines.Sending(peer, channel, tag, dtype, number, as_bytes(array))

    names = ("FlowControl", "FRAME_OVERHEAD", "HangCheck", "HangDetector", "Mailbox", "Arrived")
    return SimpleNamespace(
        **{name: getattr(_machines, name) for name in (*names, "fits", "BUDGET")},
        receiving=receiving,
        sending=sending,
        add_sending=_machines.Mailbox.add_sending,
        run=_NativePlan,
        Connection=_NativeConnection,
        Connections=_machines.Connections,
    )


@pytest.fixture(
    params=[
        "python",
        pytest.param(
            "native",
            marks=pytest.mark.skipif(_machines is None, reason="no native state machines here"),
        ),
    ]
)
def twin(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The state machines of one loop, under the names of the Python loop's."""
    return _python() if request.param == "python" else _native()
