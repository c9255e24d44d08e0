"""The processes of one peer: started, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from potluck.bench.channel import Channel, ChannelClosed, Switchboard
from potluck.bench.libraries import Peer
from potluck.errors import PotluckError

START_S = 120.0
ANSWER_S = 300.0
_END_S = 10.0
_TAIL_LINES = 12
_FOREIGN = ("POTLUCK_AGENT", "POTLUCK_JOB", "POTLUCK_WORKER", "TORCHELASTIC_USE_AGENT_STORE")


class BenchError(PotluckError):
    """A peer did not start, failed, or gave no answer; the text says which rank, and its words."""


class Placement(Protocol):
    """Where ranks run: on this machine, or in hosts of a shaped network."""

    interface: str
    """The network interface that Gloo is told to use."""

    def command(self, rank: int, arguments: Sequence[str]) -> Sequence[str]:
        """The command line that runs ``arguments`` where ``rank`` belongs."""

    def address(self, rank: int) -> str:
        """How the other ranks reach it."""

    def local_rank(self, rank: int) -> int:
        """Its number on its machine."""


class Here:
    """All ranks on this machine, over its loopback."""

    interface = "lo0" if sys.platform == "darwin" else "lo"

    def command(self, rank: int, arguments: Sequence[str]) -> Sequence[str]:
        return arguments

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def local_rank(self, rank: int) -> int:
        return rank


class Crew:
    """All ranks of one peer. They start at once; ``join`` waits until they are there."""

    def __init__(
        self,
        peer: Peer,
        world_size: int,
        folder: Path,
        *,
        placement: Placement | None = None,
        program: Sequence[str] = (sys.executable, "-m", "potluck.bench.worker"),
    ) -> None:
        self.peer = peer
        self.world_size = world_size
        self._folder = folder / peer.name
        self._folder.mkdir()
        self._place = placement or Here()
        self._switchboard = Switchboard(self._folder)
        self._channels: list[Channel] = []
        self._ports = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        arguments = [*program, peer.name]
        try:
            environment = self._environment()
            if peer.one_launcher:
                self._start(self._mpirun(arguments), environment)
            for rank in range(0 if peer.one_launcher else world_size):
                command = self._place.command(rank, arguments)
                self._start(command, environment | self._of_rank(rank))
        except BaseException:
            self.kill()
            raise

    def join(self, timeout_s: float = START_S) -> None:
        """Wait until all ranks have formed their group; BenchError if they do not."""
        try:
            found = self._switchboard.gather(self.world_size, timeout_s, self._check_alive)
        except TimeoutError as error:
            raise BenchError(f"{self.peer.name}: {error}{self._last_words()}") from None
        finally:
            self._ports.close()
        self._channels = [channel for channel, _ in found]
        sizes = {hello["world_size"] for _, hello in found}
        if sizes != {self.world_size}:
            raise BenchError(f"{self.peer.name}: its ranks see a world of {sizes}")

    def ask(self, do: str, **details: Any) -> list[dict[str, Any]]:
        """Let all ranks do something; their answers in rank order."""
        return self.answers(self.tell(do, **details))

    def ask_one(self, rank: int, do: str, **details: Any) -> dict[str, Any]:
        """Let one rank do something that needs no other."""
        channel = self._channels[rank]
        try:
            channel.send(do=do, **details)
            return channel.receive(ANSWER_S)
        except (ChannelClosed, TimeoutError) as error:
            raise self._failed(rank, do, f"gave no answer ({error})") from None

    def tell(self, do: str, **details: Any) -> str:
        """Begin something on all ranks; ``answers`` waits for it."""
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(do=do, **details)
            except ChannelClosed:
                raise self._failed(rank, do, "has ended") from None
        return do

    def answers(self, do: str) -> list[dict[str, Any]]:
        """What every rank says to the last thing it was told."""
        found = []
        for rank, channel in enumerate(self._channels):
            try:
                answer = channel.receive(ANSWER_S)
            except ChannelClosed:
                raise self._failed(rank, do, "has ended") from None
            except TimeoutError:
                raise self._failed(rank, do, f"gave no answer within {ANSWER_S:g} s") from None
            if "error" in answer:
                raise self._failed(rank, do, answer["error"])
            found.append(answer)
        return found

    @property
    def processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """One per rank, or the launcher of all."""
        return self._processes

    def end(self) -> None:
        """Let all ranks leave in order; whoever does not is killed."""
        with contextlib.suppress(BenchError, subprocess.TimeoutExpired):
            self.tell("end")
            deadline = time.monotonic() + _END_S
            for process in self._processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End everything that was started, now. Idempotent."""
        self._ports.close()
        for channel in self._channels:
            channel.close()
        self._switchboard.close()
        for process in self._processes:
            if process.poll() is None:
                # mpirun takes its ranks along when it is asked, not when it is killed.
                process.send_signal(signal.SIGTERM if self.peer.one_launcher else signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                process.kill()
                process.wait()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
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
                    start_new_session=True,  # Ctrl-C is ours; we end them
                )
            )

    def _environment(self) -> dict[str, str]:
        world = range(self.world_size)
        is_local = self._place.local_rank(self.world_size - 1) > 0
        ports = self._ports.enter_context(reserved_ports(self.world_size))
        hosts = self._folder / "mlx-hosts.json"
        hosts.write_text(json.dumps([[f"{self._place.address(r)}:{ports[r]}"] for r in world]))
        return {
            **{name: value for name, value in os.environ.items() if name not in _FOREIGN},
            "BENCH_ADDRESS": self._switchboard.address,
            "BENCH_TOKEN": self._switchboard.token,
            "BENCH_FOLDER": str(self._folder),
            "POTLUCK_PSK": secrets.token_hex(32),
            "GLOO_SOCKET_IFNAME": self._place.interface,
            "MLX_HOSTFILE": str(hosts),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": self._place.address(0),
            "MASTER_PORT": str(ports[0]),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size if is_local else 1),
            **self.peer.environment,
        }

    def _of_rank(self, rank: int) -> dict[str, str]:
        local = self._place.local_rank(rank)
        # One home is one node: ranks on other hosts have another.
        home = self._folder / f"home-{rank - local}"
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "MLX_RANK": str(rank),
            "POTLUCK_HOME": str(home),
        }

    def _mpirun(self, arguments: Sequence[str]) -> list[str]:
        options = ["--oversubscribe", "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--allow-run-as-root")
        return [self.peer.program, "-n", str(self.world_size), *options, *arguments]

    def _check_alive(self) -> None:
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                who = self.peer.program if self.peer.one_launcher else f"rank {number}"
                raise BenchError(
                    f"{self.peer.name}: {who} ended with code {process.returncode} while it "
                    f"started{self._last_words(number)}"
                )

    def _failed(self, rank: int, do: str, what: str) -> BenchError:
        words = self._last_words(0 if self.peer.one_launcher else rank)
        return BenchError(f"{self.peer.name}: rank {rank} {what} (asked to {do}){words}")

    def _last_words(self, number: int = 0) -> str:
        with contextlib.suppress(OSError):
            text = (self._folder / f"output-{number}").read_text(errors="replace")
            lines = text.strip().splitlines()[-_TAIL_LINES:]
            return "".join(f"\n    {line}" for line in lines)
        return ""


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports that, on Linux, nobody but a server that reuses addresses can take meanwhile."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("0.0.0.0", 0))
            ports.append(int(sock.getsockname()[1]))
            stack.callback(sock.close)
        if sys.platform != "linux":
            stack.close()
        yield ports
