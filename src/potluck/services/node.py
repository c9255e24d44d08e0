"""``NodeServices``: services of programs on the machines of a cluster, outside of jobs."""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from potluck._core.backends.service_transport import Caller, admission, dial
from potluck._core.checks import Duration, checked_seconds
from potluck._core.cluster.home.keyfile import locked, read_private, replace_private
from potluck._core.cluster.links.local import running_agent
from potluck._core.cluster.names import MIN_PREFIX
from potluck._core.cluster.trust.credentials import load_node_credentials
from potluck._core.forks import Owner
from potluck._core.settings import load_settings
from potluck._core.transport.bulk import BulkLink
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.listener import Admission, Limits, Listener
from potluck._core.waiting import to_stderr
from potluck._core.wire.greeting import Hello, Refusal
from potluck._core.wire.local import ServiceInfo, ServicesReply
from potluck._core.wire.peers import Served
from potluck._core.wire.services import KIND
from potluck.errors import ConfigurationError, LinkError, Refused, UnknownService
from potluck.services.channel import Blocks
from potluck.services.client import Remote, Remotes
from potluck.services.definition import Service, services_of
from potluck.services.own_agent import OwnAgent
from potluck.services.server import Server
from potluck.services.waits import attempts

FILE = "service_names.json"
MAX_NAMES = 4096

_WHAT = "the list of services and their nodes"


class Holders:
    """The node that each name of a service belongs to, for the programs of ``home``, in its file
    ``service_names.json`` (mode 0600). Threads and processes may use one home at the same time.

    Any member may serve any name. So the first node that a program here reached under a name keeps
    it: while the program there is down, no other node answers for it. ConfigurationError if the
    file is damaged.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / FILE

    def of(self, name: str) -> str:
        """The node that ``name`` belongs to; empty if it belongs to none yet."""
        return self._read().get(name, "")

    def keep(self, name: str, node: str) -> None:
        """``name`` belongs to ``node`` from now on. Of more than ``MAX_NAMES`` names the oldest
        is dropped."""
        if self.of(name) == node:
            return
        with locked(self._path.with_name(f".{FILE}.lock"), _WHAT):
            kept = {each: its for each, its in self._read().items() if each != name}
            kept[name] = node
            newest = dict(list(kept.items())[-MAX_NAMES:])
            replace_private(self._path, _WHAT, msgspec.json.encode(newest))

    def _read(self) -> dict[str, str]:
        try:
            data = read_private(self._path, _WHAT, max_bytes=4 << 20)
            return msgspec.json.decode(data, type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{_WHAT} {self._path} is damaged: {error}. Remove it; then each name belongs to "
                "the node that answers next"
            ) from error


_ASK_S = 5.0
_PAUSE_S = 0.1


class NodeServices:
    """The services that a program serves to programs on all machines of the cluster, and the
    services that it calls. For programs outside of jobs, on machines where ``potluck up`` runs.

    Use it in a ``with`` block, or call ``close``. For any number of threads.
    """

    def __init__(self, *, timeout_s: Duration | None = None, port: int = 0) -> None:
        """``timeout_s`` is the default deadline of every call, in seconds (None:
        POTLUCK_PEER_TIMEOUT_S); ``port`` the TCP port on which services are offered, 0 for any free
        one.

        ConfigurationError if no agent runs on this machine, or in a worker of a job.
        """
        self._settings = settings = load_settings()
        if settings.worker_home:
            raise ConfigurationError(
                "a worker of a job has the services of its job only, by ctx.serve and ctx.connect: "
                "its script may be another member's. Call this in a program of your own"
            )
        running_agent(settings)
        self._owner = Owner("this NodeServices")
        self._timeout_s = checked_seconds(
            settings.peer_timeout_s if timeout_s is None else timeout_s, "timeout_s"
        )
        self._wanted_port = port
        self._credentials: Credentials = load_node_credentials(settings)
        memory, max_bytes = Blocks(), settings.max_call_bytes
        self._remotes = Remotes(timeout_s=self._timeout_s, max_bytes=max_bytes, memory=memory)
        self._server = Server(
            rank_of=lambda worker: -1,
            max_bytes=max_bytes,
            memory=memory,
            objects_to=self._credentials.objects_to,
        )
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._agent = OwnAgent(settings)
        self._holders = Holders(settings.home)

    def __enter__(self) -> NodeServices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def node(self) -> str:
        """The id of this machine's node, as its services' callers and callees see it."""
        return self._credentials.node_id

    def serve(self, *things: Any) -> None:
        """Offer services to programs on all machines of the cluster, until ``close``.

        ``things`` are functions, and instances of classes, made with
        [service][potluck.service]. Their methods run on threads of this process. TypeError for
        other things, ValueError for a name that this object serves already or that is too long,
        ConfigurationError if another program of this machine serves one of the
        names, LinkError if the agent of this machine does not answer, or after ``close``.
        """
        self._owner.check()
        services = services_of(*things)
        with self._lock:
            self._check_open()
            port = self._listening().port
            announced = _announced(services, port)
            self._server.add(services)
            try:
                self._agent.register(announced)
            except BaseException:
                self._server.remove(each.name for each in services)
                raise

    def connect(self, name: str, *, node: str = "", timeout: Duration | None = None) -> Remote:
        """Find the service ``name``, and return a [Remote][potluck.Remote] with its methods.

        ``node`` is the name of the machine that serves it, or its node's id or the beginning of
        that. Without it the name belongs to the machine that served it first for programs of this
        home, and one machine only may serve a name that is new here. Asks the agents again and
        again until one has the service; UnknownService after ``timeout`` seconds, or at once if
        several machines serve it. The Remote stays with that node, also if its program is started
        again.
        """
        self._owner.check()
        seconds = self._timeout_s if timeout is None else checked_seconds(timeout)
        found = self._find(name, node, seconds)
        where = _called(found)

        def dialled(deadline: float) -> BulkLink:
            left = max(0.001, deadline - time.monotonic())
            reply = self._agent.find(name, min(left, _ASK_S), node=found.node)
            if not reply.services:
                why = "does not answer" if reply.silent else f"does not serve {name!r} now"
                raise LinkError(f"{where} {why}")
            [now] = reply.services
            return dial(
                (now.host, now.service.port),
                Hello(kind=KIND),
                self._credentials,
                node=found.node,
                whom=f"service {name!r}",
                deadline=deadline,
            )

        return self._remotes.make(
            name, where, dialled, lambda: self._credentials.objects_to(found.node) is None
        )

    def wait(self) -> None:
        """Serve until Ctrl-C, or until another thread calls ``close``. LinkError if the listener
        has failed."""
        self._owner.check()
        names = ", ".join(map(repr, self._server.names()))
        if self._listener is None or not names:
            raise ConfigurationError("nothing is served here yet; call serve before wait")
        to_stderr(
            f"serving {names} on {self._settings.machine_name} ({self.node[:8]}), port "
            f"{self._listener.port}; Ctrl-C ends it"
        )
        try:
            self._over.wait()
        except KeyboardInterrupt:
            return
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End all connections, and withdraw the services from the agent. Idempotent; does nothing
        in a forked child."""
        if not self._owner.is_here:
            return
        self._over.set()
        self._agent.close()
        self._remotes.close()
        with self._lock:
            listener = self._listener
        if listener is not None:
            listener.close()
        self._server.close()

    # -- inside

    def _listening(self) -> Listener:
        if self._listener is None:
            settings = self._settings
            self._listener = Listener(
                settings.bind,
                self._wanted_port,
                self._credentials,
                limits=Limits(settings.max_pending, settings.hello_timeout_s),
                use_shared_memory=False,
                on_broken=self._broken,
            )
            self._listener.serve(self._admit)
        return self._listener

    def _admit(self, hello: Hello, node: str) -> Admission:
        """A connection of a node on the list; the listener has refused workers of jobs."""
        if hello.kind != KIND:
            text = f"this program takes calls of its services, not {hello.kind!r:.80} connections"
            return Admission(Refusal("kind", text))
        caller = Caller(node)
        return admission(caller, self._server.objection(caller), self._server.take)

    def _check_open(self) -> None:
        """LinkError after ``close``, or if the listener has failed."""
        if self._over.is_set():
            raise self._failure or LinkError("the services of this program were closed")

    def _broken(self, failure: BaseException) -> None:
        self._failure = failure
        self._over.set()

    def _find(self, name: str, node: str, timeout_s: float) -> ServiceInfo:
        """The one service of this ``name`` on ``node``, or else on the node that the name belongs
        to here (``Holders``), as soon as there is one."""
        holder = "" if node else self._holders.of(name)
        seen = ""
        for deadline in attempts(timeout_s, _PAUSE_S, self._over.wait):
            self._check_open()
            left = max(0.001, deadline - time.monotonic())
            try:
                reply = self._agent.find(name, min(left, _ASK_S))
            except Refused:
                raise
            except LinkError as error:
                # keep the earlier reason: the last attempt may only time out
                seen = seen or str(error)
            else:
                found = [each for each in reply.services if _is_on(holder or node, each)]
                if len(found) > 1:
                    raise UnknownService(
                        f"{name!r} is served by {len(found)} machines: "
                        f"{', '.join(map(_called, found))}; name one, by node=..."
                    )
                if found:
                    self._holders.keep(name, found[0].node)
                    return found[0]
                seen = _elsewhere(reply)
                if holder and reply.services:
                    seen += (
                        f", but {name!r} belongs to node {holder[:8]}, which served it first; "
                        "another one takes it over if you name that by node=..."
                    )
        on = f" on node {node!r}" if node else ""
        raise UnknownService(
            f"nobody served {name!r}{on} within {timeout_s:g} s: {seen}. `potluck services` lists "
            "what is served"
        )


def _is_on(node: str, info: ServiceInfo) -> bool:
    """Whether ``node``, which a person wrote, is the node of ``info``; empty is any. A machine
    chooses its own name, but its name can't pass for the id of another, or for its beginning: eight
    or more hexadecimal digits are no name."""
    if len(node) >= MIN_PREFIX and set(node.lower()) <= set(string.hexdigits):
        return info.node.startswith(node.lower())
    return node in ("", info.machine)


def _called(info: ServiceInfo) -> str:
    return f"node {info.machine or '-'} ({info.node[:8]})"


def _elsewhere(reply: ServicesReply) -> str:
    """What the agents answered, without a node that serves it."""
    parts = [f"{_called(each)} serves it" for each in reply.services]
    silent = ", ".join(each[:8] for each in reply.silent)
    if silent:
        parts.append(f"no answer came from {silent}")
    return "; ".join(parts) or "no machine that is linked serves it"


def _announced(services: Sequence[Service], port: int) -> Served:
    """``services`` as the agents announce them to other machines."""
    raw = [{"name": each.name, "methods": sorted(each.methods), "port": port} for each in services]
    try:
        return msgspec.convert(raw, Served)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"these services can't be announced to other machines: {error}. Names are up to 64 "
            "characters, all of them visible"
        ) from None
