"""Jobs on machines that a manager gives: Slurm, Ray, Dask, mpirun, Kubernetes.

An *allocation* is a cluster for one job. The *launcher* is the agent that starts the job; its
process lives as long as the job. Each machine has a *member*: a process with an agent that calls
the launcher's addresses and runs the launcher's jobs, no others. The cluster is open to those that
hold its secret, which is made for it and kept in memory: a member reads it from its standard input
or, in a pod, from a Secret. Members come and go as machines of ``potluck up`` do; with the launcher
the job ends. All files of an allocation are in temporary homes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import psutil

from potluck._core.background import stop
from potluck._core.cluster.discovery.configured import MAX_PEERS, StaticPeers
from potluck._core.cluster.jobs.summary import Summary
from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.cluster.past_jobs import LOG_ANSWER_S
from potluck._core.cluster.run import JobClient, Watcher, travelling
from potluck._core.cluster.sharing.offers import SharingStore
from potluck._core.cluster.sharing.rules import Kept
from potluck._core.settings import Settings
from potluck._core.system import SIGUSR1, heard
from potluck._core.wire import jobs
from potluck._core.wire.format import Name
from potluck._core.wire.local import RunRequest
from potluck._core.wire.peers import Place
from potluck.errors import ConfigurationError, LinkError

MAX_INVITATION = 1 << 16
MEET_S = 600.0
"""Seconds for which a member waits for its launcher to be there."""
_LOST_S = 10.0
_LEAVE_S = 20.0
_LOOK_S = 0.25


class Invitation(msgspec.Struct, frozen=True):
    """What a member has to know: the allocation's secret, where the launcher listens, and the
    launcher's id, if it is known. On a pipe it is one line of JSON."""

    psk: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    peers: Annotated[tuple[Place, ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]
    starter: Name = ""

    def __repr__(self) -> str:
        return f"<invitation of {self.starter[:12]}>"

    def line(self) -> bytes:
        """The invitation as a member reads it."""
        return msgspec.json.encode(self) + b"\n"


def parse_invitation(line: bytes) -> Invitation:
    """ConfigurationError if ``line`` is no invitation; the error does not show it."""
    try:
        return msgspec.json.decode(line, type=Invitation)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigurationError(
            "the standard input holds no invitation; `potluck launch` starts the members itself"
        ) from None


class Fleet(Protocol):
    """Keeps a member on each machine, by the means of a manager, until it is cancelled."""

    async def __call__(self, invitation: Invitation) -> None:
        """Returns when no member is left and none can be started; LinkError says why."""


async def by_themselves(invitation: Invitation) -> None:
    """The fleet of pods: Kubernetes starts them."""
    await asyncio.Event().wait()


async def launch(
    request: RunRequest,
    settings: Settings,
    watcher: Watcher,
    fleet: Fleet,
    *,
    collect: Callable[[Settings, Summary], object],
    trains: bool = False,
    warned: Callable[[], object] = lambda: None,
) -> Summary:
    """Run the job of ``request`` on the members that ``fleet`` starts. ``settings.psk`` is the
    allocation's secret (None: a new one); ``trains``: this machine gets workers, too.

    SIGINT and SIGTERM end the job as Ctrl-C does: elastic scripts write a checkpoint. SIGUSR1, the
    notice of a manager, does the same and calls ``warned``. ``collect`` is called at the end, in a
    thread, while the members are still there. ConfigurationError if the job can't begin; LinkError
    if no member is left.
    """
    settings = settings if trains else replace(settings, name="launcher")
    with _home(settings, Kept("none", is_paused=not trains)) as own:
        agent = NodeAgent(own, on_note=lambda text: None, is_launched=True)
        client = JobClient(request.script, (), watcher)
        running = asyncio.create_task(agent.run())
        job = asyncio.create_task(_job(agent, request, client))
        members = asyncio.create_task(_fleet(fleet, agent, own.psk or ""))
        tasks = (job, members, running)
        watcher.begin(client)
        try:
            with _signals(client, warned):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # the error that ends the job
                        break
                summary = client.summary.result()
                await asyncio.to_thread(collect, own, summary)
                return summary
        finally:
            # The agent first: its members see that it has left after the job, and leave, too.
            await stop(job, running)
            await stop(members)
            watcher.end()


async def _job(agent: NodeAgent, request: RunRequest, client: JobClient) -> None:
    submitting = asyncio.create_task(_submit(agent, request, client))

    def interrupt(number: int) -> None:
        submitting.cancel()

    client.interrupts_by(interrupt)
    try:
        await asyncio.wait([submitting])
    finally:
        submitting.cancel()
    if submitting.cancelled():
        raise LinkError("interrupted before the job began")
    submitting.result()
    client.interrupts_by(partial(agent.jobs.interrupt, client))
    await client.follow(
        lambda request: agent.links.ask(agent.me, request, jobs.LogLines, timeout_s=LOG_ANSWER_S)
    )
    await client.summary


async def _submit(agent: NodeAgent, request: RunRequest, client: JobClient) -> None:
    await agent.ready.wait()
    await agent.jobs.submit(await asyncio.to_thread(travelling, request), client)


async def _fleet(fleet: Fleet, agent: NodeAgent, psk: str) -> None:
    await agent.ready.wait()
    peers = tuple((host, agent.port) for host in own_addresses())
    await fleet(Invitation(psk, peers[:MAX_PEERS], agent.me))
    raise LinkError("no member of this allocation is left")


@contextmanager
def _signals(client: JobClient, warned: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def notice() -> None:
        warned()
        client.interrupt(signal.SIGINT)

    numbers = heard(signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, client.interrupt, signal.SIGINT)
    loop.add_signal_handler(SIGUSR1, notice)
    try:
        yield
    finally:
        for number in (*numbers, SIGUSR1):
            loop.remove_signal_handler(number)


async def take_part(invitation: Invitation, settings: Settings, leaving: asyncio.Event) -> int:
    """Be a member until the launcher is gone, or ``leaving`` is set; returns the exit code: 0 if
    the launcher's job was over, or never began.

    SIGTERM, which a manager sends to a whole allocation or to one machine, is heeded after a grace
    period: until then the launcher may end the job in order. LinkError if no launcher comes.
    """
    settings = replace(settings, psk=invitation.psk)
    rule = Kept("none", allowed=(invitation.starter,)) if invitation.starter else Kept("all")
    with _home(settings, rule) as own:
        agent = NodeAgent(
            own,
            on_note=lambda text: None,
            finders=[StaticPeers(invitation.peers)],
            is_launched=True,
        )
        running = asyncio.create_task(agent.run())
        loop = asyncio.get_running_loop()
        for number in heard(signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, loop.call_later, _LEAVE_S, leaving.set)
        over = asyncio.create_task(_until_over(agent, invitation.starter, leaving))
        try:
            await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # why the agent broke
            return over.result()
        finally:
            await stop(over, running)


async def _until_over(agent: NodeAgent, starter: str, leaving: asyncio.Event) -> int:
    loop = asyncio.get_running_loop()
    await agent.ready.wait()
    last, has_met, has_run = loop.time(), False, False
    while not leaving.is_set():
        for runner in agent.jobs.runners.values():
            starter, has_run = runner.spec.starter, True
        is_over = has_run and not agent.jobs.runners
        limit = MEET_S if not has_met else 0.0 if is_over else _LOST_S
        if starter and agent.links.address(starter):
            last, has_met = loop.time(), True
        elif loop.time() - last > limit:
            if not has_met:
                raise LinkError(f"no launcher was there in {MEET_S:g} s")
            return 0 if is_over else 1
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await leaving.wait()
    return 0


@contextmanager
def _home(settings: Settings, rule: Kept) -> Iterator[Settings]:
    """``settings`` with a home of its own, which ends with the block, and with ``rule``."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        SharingStore(Path(folder)).write(rule)
        yield replace(
            settings,
            home=Path(folder),
            psk=settings.psk or secrets.token_hex(32),
            passphrase=None,
            worker_home="",
        )


def own_addresses() -> tuple[str, ...]:
    """The addresses by which other machines may reach this one; the loopback's without any."""
    found = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            try:
                address: Any = ipaddress.ip_address(each.address)
            except ValueError:  # of a link layer, or with a scope
                continue
            if not address.is_loopback and not address.is_link_local:
                found.append(str(address))
    return tuple(found) or ("127.0.0.1",)
