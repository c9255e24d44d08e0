"""A crew: the worker processes of one peer. They are started, given tasks, and ended.

Tasks and answers are lines of JSON over a blocking socket. It is no service of potluck's: a worker
runs its tasks on the main thread, where MPI and torch expect collectives, and while another peer is
measured it sleeps in one read; a service has threads, which look around once a second. mpirun
forwards stdin to rank 0 only, so stdin can't be used. A Unix socket reaches into other network
namespaces, and other users can't open it; on Windows it is a TCP socket on the loopback. In both
cases a worker must send the token that was put into its environment.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck._core.system import SIGKILL, need_posix
from potluck.cli.bench.peers import Competitor
from potluck.cli.bench.placement import BenchError, Here, reserved_ports

_HELLO_S = 10.0
_LOOK_S = 0.2


class ChannelClosed(Exception):
    """The other end closed the channel, or its process ended."""


class Channel:
    """One end of a control channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""

    @classmethod
    def connect(cls, address: str, **hello: Any) -> Channel:
        """The worker's end, connected to a listener's ``address``; ``hello`` is its first
        message."""
        kind, _, where = address.partition(":")
        if kind == "unix":
            need_posix("a Unix socket")
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(where)
        else:
            sock = socket.create_connection(("127.0.0.1", int(where)))
        channel = cls(sock)
        channel.send(**hello)
        return channel

    @classmethod
    def to_crew(cls, rank: int, world_size: int) -> Channel:
        """The end of a worker process, connected to the crew that has started it."""
        address, token = os.environ["BENCH_ADDRESS"], os.environ["BENCH_TOKEN"]
        return cls.connect(address, token=token, rank=rank, world_size=world_size)

    def serve(self, tasks: Mapping[str, Callable[..., dict[str, Any] | None]]) -> int:
        """Run the tasks that the crew asks for, by name, with what it asks as arguments, until it
        says end. Returns 0; 1 if the crew is gone, or after a task that raised."""
        try:
            while (message := self.receive())["do"] != "end":
                answer = tasks[message.pop("do")](**message)
                self.send(**answer or {})
        except ChannelClosed:
            return 1
        except Exception as error:
            traceback.print_exc()
            self.send(error=f"{type(error).__name__}: {error}")
            return 1
        return 0

    def send(self, **message: Any) -> None:
        """Send one message; ChannelClosed if the other end is closed."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. ChannelClosed at the end of the channel; TimeoutError if no message is
        complete after ``timeout_s`` seconds (None: wait without a limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.001, deadline - time.monotonic())
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:  # an OSError, too
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other end closed it")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()


class WorkerListener:
    """The socket that the workers of one peer connect to. ``address`` and ``token`` go into their
    environment."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        if sys.platform != "win32":
            path = folder / f"{secrets.token_hex(4)}.sock"
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(path))
            self._socket.listen(64)
            self.address = f"unix:{path}"
        else:
            self._socket = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:{self._socket.getsockname()[1]}"

    def gather(
        self, ranks: Sequence[int], timeout_s: float, check: Callable[[], None]
    ) -> list[tuple[Channel, dict[str, Any]]]:
        """Accept the workers of ``ranks``: the channel and the first message of each, in that
        order.

        ``check`` is called every 0.2 s meanwhile, and may raise. TimeoutError, with the ranks that
        are missing, after ``timeout_s`` seconds.
        """
        found: dict[int, tuple[Channel, dict[str, Any]]] = {}
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(_LOOK_S)
        while len(found) < len(ranks):
            check()
            if time.monotonic() > deadline:
                absent = [rank for rank in ranks if rank not in found]
                ranks_absent = ", ".join(map(str, absent))
                raise TimeoutError(f"rank {ranks_absent} did not start within {timeout_s:g} s")
            with contextlib.suppress(TimeoutError):
                channel = Channel(self._socket.accept()[0])
                with contextlib.suppress(ChannelClosed, ValueError, KeyError):
                    hello = channel.receive(_HELLO_S)
                    is_ours = hmac.compare_digest(str(hello["token"]), self.token)
                    if is_ours and hello["rank"] in ranks:
                        found[hello["rank"]] = channel, hello
                        continue
                channel.close()
        return [found[rank] for rank in ranks]

    def close(self) -> None:
        self._socket.close()


START_S = 120.0
ANSWER_S = 300.0
"""For an answer, unless what is asked takes longer."""
_END_S = 10.0
_TAIL_LINES = 12
_FOREIGN = ("POTLUCK_AGENT", "POTLUCK_JOB", "POTLUCK_WORKER", "TORCHELASTIC_USE_AGENT_STORE")


class Crew:
    """All ranks of one peer. The constructor starts them; ``join`` waits for their group.

    ``placement`` says where they run, ``program`` is the command line of a worker. Used as a
    context manager, the crew ends its processes, or kills them after an exception.
    """

    def __init__(
        self,
        peer: Competitor,
        world_size: int,
        folder: Path,
        *,
        placement: Here | None = None,
        program: Sequence[str] = (sys.executable, "-m", "potluck.cli.bench.worker"),
    ) -> None:
        self.peer = peer
        self.world_size = world_size
        self._folder = folder / peer.name
        self._folder.mkdir()
        self._place = placement or Here()
        self._ranks = self._place.ranks(world_size)
        self._listener = WorkerListener(self._folder)
        self._channels: list[Channel] = []
        self._ports = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        arguments = [*program, peer.name]
        try:
            environment = self._environment()
            if peer.one_launcher:
                self._start(self._mpirun(arguments), environment)
            for rank in () if peer.one_launcher else self._ranks:
                command = self._place.command(rank, arguments)
                self._start(command, environment | self._of_rank(rank))
        except BaseException:
            self.kill()
            raise

    def join(self, timeout_s: float = START_S) -> None:
        """Wait until all ranks have formed their group. BenchError, with the last lines of a rank's
        output, if one ended or ``timeout_s`` seconds are over."""
        self._together(lambda: self._join(timeout_s))

    def _join(self, timeout_s: float) -> list[dict[str, Any]]:
        try:
            found = self._listener.gather(self._ranks, timeout_s, self._check_alive)
        except TimeoutError as error:
            raise BenchError(f"{self.peer.name}: {error}{self._last_words()}") from None
        finally:
            self._ports.close()
        self._channels = [channel for channel, _ in found]
        sizes = {hello["world_size"] for _, hello in found}
        if sizes != {self.world_size}:
            raise BenchError(f"{self.peer.name}: its ranks see a world of {sizes}")
        return []

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **details: Any) -> list[dict[str, Any]]:
        """Give all ranks the task ``do``; their answers in rank order. BenchError if a rank fails,
        or gives no answer within ``timeout_s`` seconds."""
        return self._together(lambda: self._ask(do, timeout_s, details))

    def _ask(self, do: str, timeout_s: float, details: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._tell(do, details)
        return self._answers(do, timeout_s)

    def _together(self, do: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The answers of all machines' ranks; BenchError on every machine if one of them failed."""
        try:
            mine: dict[str, Any] = {"answers": do()}
        except BenchError as error:
            mine = {"failed": str(error)}
        gathered = self._place.exchange(mine)
        for found in gathered:
            if "failed" in found:
                raise BenchError(found["failed"])
        return [answer for found in gathered for answer in found["answers"]]

    def _tell(self, do: str, details: Mapping[str, Any]) -> None:
        for rank, channel in zip(self._ranks, self._channels, strict=False):
            try:
                channel.send(do=do, **details)
            except ChannelClosed:
                raise self._failed(rank, do, "has ended") from None

    def _answers(self, do: str, timeout_s: float) -> list[dict[str, Any]]:
        found = []
        deadline = time.monotonic() + timeout_s
        for rank, channel in zip(self._ranks, self._channels, strict=False):
            try:
                answer = channel.receive(max(0.0, deadline - time.monotonic()))
            except ChannelClosed:
                raise self._failed(rank, do, "has ended") from None
            except TimeoutError:
                raise self._failed(rank, do, f"gave no answer within {timeout_s:g} s") from None
            if "error" in answer:
                raise self._failed(rank, do, answer["error"])
            found.append(answer)
        return found

    def end(self) -> None:
        """Tell all ranks to leave their group; kill the processes that run after ``_END_S``
        seconds."""
        with contextlib.suppress(BenchError, subprocess.TimeoutExpired):
            self._tell("end", {})
            deadline = time.monotonic() + _END_S
            for process in self._processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill all processes and close all sockets. Idempotent."""
        self._ports.close()
        for channel in self._channels:
            channel.close()
        self._listener.close()
        for process in self._processes:
            if process.poll() is None:
                # mpirun ends its ranks on SIGTERM; a SIGKILL would leave them running.
                process.send_signal(signal.SIGTERM if self.peer.one_launcher else SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                process.kill()
                process.wait()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.end()
        else:
            self.kill()

    # -- inside

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with (self._folder / f"output-{len(self._processes)}").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the comparison only, which ends them
                )
            )

    def _environment(self) -> dict[str, str]:
        place, world = self._place, range(self.world_size)
        most_local = max(place.local_rank(rank) for rank in world) + 1
        mine = self._ports.enter_context(reserved_ports(len(self._ranks)))
        ports = [port for each in place.exchange({"ports": mine}) for port in each["ports"]]
        hosts = self._folder / "mlx-hosts.json"
        hosts.write_text(json.dumps([[f"{place.address(r)}:{ports[r]}"] for r in world]))
        store = f"file://{self._folder}/gloo-store"
        if not place.is_one_machine:
            store = f"tcp://{place.address(0)}:{ports[0]}"
        return {
            **{name: value for name, value in os.environ.items() if name not in _FOREIGN},
            "BENCH_ADDRESS": self._listener.address,
            "BENCH_TOKEN": self._listener.token,
            **({"POTLUCK_PSK": secrets.token_hex(32)} if place.is_one_machine else {}),
            "GLOO_SOCKET_IFNAME": place.interface,
            "BENCH_STORE": store,
            "MLX_HOSTFILE": str(hosts),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": place.address(0),
            "MASTER_PORT": str(ports[0]),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(most_local),
            **self.peer.environment,
        }

    def _of_rank(self, rank: int) -> dict[str, str]:
        local = self._place.local_rank(rank)
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "MLX_RANK": str(rank)}
        if self._place.is_one_machine:
            # A home stands for a node: ranks on different hosts must not share it.
            variables["POTLUCK_HOME"] = str(self._folder / f"home-{rank - local}")
        return variables

    def _mpirun(self, arguments: Sequence[str]) -> list[str]:
        options = ["--oversubscribe", "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--allow-run-as-root")
        return [self.peer.program, "-n", str(self.world_size), *options, *arguments]

    def _check_alive(self) -> None:
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                rank = f"rank {self._ranks[number]}"
                name = self.peer.program if self.peer.one_launcher else rank
                raise BenchError(
                    f"{self.peer.name}: {name} ended with code {process.returncode} while it "
                    f"started{self._last_words(number)}"
                )

    def _failed(self, rank: int, do: str, what: str) -> BenchError:
        number = 0 if self.peer.one_launcher else list(self._ranks).index(rank)
        words = self._last_words(number)
        return BenchError(f"{self.peer.name}: rank {rank} {what} (asked to {do}){words}")

    def _last_words(self, number: int = 0) -> str:
        with contextlib.suppress(OSError):
            text = (self._folder / f"output-{number}").read_text(errors="replace")
            lines = text.strip().splitlines()[-_TAIL_LINES:]
            return "".join(f"\n    {line}" for line in lines)
        return ""
