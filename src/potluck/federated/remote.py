"""A federation over the services of a job: the server's side and a client's.

Clients register at the server every ``_REGISTER_EVERY_S`` seconds, and the server calls them. The
server forgets a client at the first call that fails; a client that is started again registers
anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from potluck._core.background import start_thread
from potluck._core.context import DistributedContext
from potluck._core.waiting import Reminder
from potluck.errors import PotluckError, ServiceError, ServiceLost, ServiceTimeout
from potluck.federated.federation import Reply
from potluck.federated.participant import Answer, Participant
from potluck.services import Call, Remote, service

LEADER = "0"
"""The worker that runs the server's function, by name: the first one, on the command's node."""

CLIENT_SERVICE = "potluck.federated.client"
SERVER_SERVICE = "potluck.federated.server"

_CONNECT_S = 5.0
_REGISTER_EVERY_S = 2.0
_FIRST_EVERY_S = 0.2
_STOP_S = 5.0
_GIVE_UP_S = 60.0

KNOWN, AGAIN, OVER = "known", "again", "over"


class RemoteClients:
    """The server's list of a job's clients."""

    is_simulated = False

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self._changed = threading.Condition()
        self._remotes: dict[str, Remote] = {}
        self._unfit: dict[str, str] = {}
        self._machines: dict[str, str] = {}
        """By client, also of clients that have left."""
        self._calls: dict[str, str] = {}
        """By busy client: the method that it runs."""
        self._late: set[str] = set()
        """Clients whose answer missed a deadline, until they report that they are idle."""
        self._is_over = False
        ctx.serve(_Registry(self))

    # -- for the federation

    def wait(self, num: int, timeout_s: float) -> Sequence[str]:
        deadline = time.monotonic() + timeout_s
        reminder = Reminder(lambda: self._waited_for(num), deadline)
        with self._changed:
            while len(self._idle()) < num and time.monotonic() < deadline:
                self._changed.wait(reminder.patience())
                reminder.tick()
            return self._idle()

    def called(self, client: str) -> str:
        machine = self._machines.get(client)
        return f"{client} on {machine}" if machine else client

    def none_fit(self) -> str:
        with self._changed:
            unfit = dict(self._unfit)
        clients = sorted({member.worker for member in self._ctx.members} - {LEADER})
        if any(client not in unfit for client in clients):
            return ""
        return "; ".join(f"client {self.called(each)}: {unfit[each]}" for each in clients)

    def start(
        self,
        method: str,
        arguments: Mapping[str, Mapping[str, Any]],
        timeout_s: float | None,
        put: Callable[[Reply], None],
    ) -> Callable[[], None]:
        is_over = threading.Event()

        def call(client: str, remote: Remote) -> None:
            answer: Answer | None = None
            try:
                answer = remote.answer(client, method, arguments[client], timeout=timeout_s)
                reason = "" if isinstance(answer, dict) else "its answer is no dict"
            except ServiceTimeout:  # the round has ended, and counts its late clients
                with self._changed:
                    self._late.add(client)
                return
            except ServiceLost:
                reason = "it ended, or can't be reached"
                self._forget(client, remote)
            except ServiceError as error:
                reason = str(error)
                self._forget(client, remote)
            finally:
                with self._changed:
                    self._calls.pop(client, None)
                    self._changed.notify_all()
            if not is_over.is_set():
                put(Reply(client, None if reason else answer, reason))

        for client in arguments:
            with self._changed:
                remote = self._remotes.get(client)
                self._calls[client] = method
            if remote is None:
                with self._changed:
                    self._calls.pop(client, None)
                put(Reply(client, None, "it has left"))
                continue

            def broken(error: BaseException, client: str = client) -> None:
                put(Reply(client, None, f"{type(error).__name__}: {error}"))

            def run(client: str = client, remote: Remote = remote) -> None:
                call(client, remote)

            start_thread(run, name=f"potluck-call-client-{client}", on_broken=broken)
        return is_over.set

    # -- for clients

    def register(self, call: Call, epoch: int, unfit: str, is_busy: bool) -> str:
        """Note a live client; ``unfit``: why it can't take part; ``is_busy``: it computes an
        answer. Returns ``KNOWN``; ``AGAIN``, soon, if this worker is not in the client's group yet;
        or ``OVER``."""
        client = call.worker
        if self._is_over:
            return OVER
        if call.rank < 0 or client == LEADER or epoch > self._ctx.epoch:
            return AGAIN
        with self._changed:
            is_known = client in self._remotes
        if not is_known:
            remote = self._ctx.connect(CLIENT_SERVICE, rank=call.rank, timeout=_CONNECT_S)
            with self._changed:
                self._remotes[client] = remote
                self._machines |= {each.worker: each.machine for each in self._ctx.members}
        with self._changed:
            is_new = bool(unfit) and self._unfit.get(client) != unfit
            self._unfit = {name: why for name, why in self._unfit.items() if name != client}
            if unfit:
                self._unfit[client] = unfit
            if not is_busy:
                self._late.discard(client)
            self._changed.notify_all()
        if is_new:
            self._ctx.report(event=f"client {self.called(client)} takes no part: {unfit}")
        return KNOWN

    def stop(self) -> None:
        """Stop all clients, in at most ``_STOP_S``."""
        self._is_over = True
        with self._changed:
            remotes = list(self._remotes.values())
        works = [each.stop.start(timeout=_STOP_S) for each in remotes]
        for work in works:
            try:
                work.wait()
            except PotluckError:
                continue  # the client has ended, registers again, or gives up after _GIVE_UP_S

    # -- inside

    def _idle(self) -> list[str]:
        present = {member.worker for member in self._ctx.members}
        free = present - self._unfit.keys() - self._calls.keys() - self._late
        there = [each for each in self._remotes if each in free]
        return sorted(there, key=lambda each: (len(each), each))

    def _forget(self, client: str, remote: Remote) -> None:
        with self._changed:
            if self._remotes.get(client) is remote:
                del self._remotes[client]
        remote.close()

    def _waited_for(self, num: int) -> str:
        unfit = "".join(f"; client {self.called(name)}: {why}" for name, why in self._unfit.items())
        return f"the federation waits for clients: {len(self._idle())} of {num} are there{unfit}"


@service(SERVER_SERVICE, concurrent=True)
class _Registry:
    """The clients' calls at the server."""

    def __init__(self, clients: RemoteClients) -> None:
        self._clients = clients

    def register(self, call: Call, epoch: int, unfit: str, is_busy: bool) -> str:
        return self._clients.register(call, int(epoch), str(unfit)[:1000], bool(is_busy))


@service(CLIENT_SERVICE, concurrent=True)
class _ClientService:
    """The server's calls at a client, one method at a time; other callers are refused."""

    def __init__(
        self, name: str, leader: str, participant: Participant | None, ended: threading.Event
    ) -> None:
        """``leader``: the server's node."""
        self._name = name
        self._leader = leader
        self._participant = participant
        self._ended = ended
        self._lock = threading.Lock()

    def answer(self, call: Call, client: str, method: str, arguments: Mapping[str, Any]) -> Answer:
        self._check(call)
        if client != self._name or self._participant is None:
            return {"refused": f"this is client {self._name}, not {client}"}
        if not self._lock.acquire(blocking=False):
            return {"refused": "it is still busy with an earlier round"}
        try:
            return self._participant.answer(method, arguments)
        finally:
            self._lock.release()

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being computed."""
        return self._lock.locked()

    def stop(self, call: Call) -> None:
        self._check(call)
        self._ended.set()

    def _check(self, call: Call) -> None:
        if call.worker != LEADER or call.node != self._leader:
            raise PermissionError("only the federation's server may call its clients")


def serve_client(
    ctx: DistributedContext,
    participant: Participant | None,
    ended: threading.Event,
    unfit: str = "",
) -> None:
    """Be a client of the federation that worker ``LEADER`` leads, until ``ended``, or until the
    server could not be reached for ``_GIVE_UP_S``. ``unfit`` says why this worker can't take
    part."""
    me = ctx.group.me.worker
    while (leader := _node_of_leader(ctx)) is None:
        if ended.wait(_FIRST_EVERY_S):
            return
    mine = _ClientService(me, leader, participant, ended)
    ctx.serve(mine)
    server: Remote | None = None
    heard_at, pause_s = time.monotonic(), 0.0
    while not ended.wait(pause_s) and time.monotonic() < heard_at + _GIVE_UP_S:
        pause_s = _FIRST_EVERY_S
        group = ctx.group
        rank = group.rank_of(LEADER)
        if rank < 0:
            continue  # the server is being started again
        try:
            if server is None:
                server = ctx.connect(SERVER_SERVICE, rank=rank, timeout=_CONNECT_S)
            reply = server.register(group.epoch, unfit, mine.is_busy, timeout=2 * _CONNECT_S)
        except PotluckError:
            server = None
            continue
        heard_at = time.monotonic()
        if reply == OVER:
            return
        if reply == KNOWN:
            pause_s = _REGISTER_EVERY_S


def _node_of_leader(ctx: DistributedContext) -> str | None:
    """The node of the server; None while it is being started again."""
    return next((each.node for each in ctx.members if each.worker == LEADER), None)
