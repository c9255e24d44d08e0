"""A slow cable: every frame of a host waits, in both directions. For kernels without ``netem``.

with Delay(host, 0.050, jitter_s=0.020):
    ...                                    # 50 +- 20 ms each way, for all traffic

Frames of one direction stay in order. Limited by Python: some 10,000 frames a second.
"""

from __future__ import annotations

from types import TracebackType

from support.bridge import BridgeProgram
from support.hosts import Host

_SCRIPT = """
import contextlib, random, select, socket, sys, time
from collections import deque
delay, jitter, rng = float(sys.argv[3]), float(sys.argv[4]), random.Random(sys.argv[5])
ends = []
for name in sys.argv[1:3]:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    end.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR: frames that are not cut up yet
    end.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)  # SO_RCVBUFFORCE
    end.bind((name, 0))
    ends.append(end)
queues = {end: deque() for end in ends}
print("ready", flush=True)
sys.stdin.readline()
for end in ends:  # what came until now went the old way
    with contextlib.suppress(BlockingIOError):
        while end.recv(1 << 17, socket.MSG_DONTWAIT):
            pass
while True:
    now = time.monotonic()
    waits = [queue[0][0] - now for queue in queues.values() if queue]
    ready = select.select([*ends, sys.stdin], [], [], max(0, min(waits, default=60)))[0]
    if sys.stdin in ready:
        break
    for end, other in (ends, ends[::-1]):
        if end in ready:
            data, (_, _, kind, *_) = end.recvfrom(1 << 17)
            if kind != socket.PACKET_OUTGOING:
                at = time.monotonic() + delay + rng.uniform(-jitter, jitter)
                queue = queues[other]
                queue.append((max(at, queue[-1][0]) if queue else at, data))
        while queues[other] and queues[other][0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # a full queue behind it drops the frame
                other.send(queues[other].popleft()[1])
"""


class Delay:
    """Each frame from and to ``host`` takes ``delay_s`` longer, give or take up to ``jitter_s``.
    A context manager; ``seed`` repeats it."""

    def __init__(self, host: Host, delay_s: float, *, jitter_s: float = 0.0, seed: int = 0):
        if not 0 <= jitter_s <= delay_s:
            raise ValueError(f"a jitter is between 0 and the delay, not {jitter_s}")
        self._host = host
        self._inner, self._outer = f"slow{host.index}", f"wire{host.index}"
        network = host.network
        network.ip("link", "add", self._inner, "type", "veth", "peer", "name", self._outer)
        network.ip("link", "set", self._inner, "up")
        network.ip("link", "set", self._outer, "master", "br0", "up")
        arguments = (host.port, self._inner, str(delay_s), str(jitter_s), str(seed))
        self._program = BridgeProgram(network, _SCRIPT, *arguments, ready="ready")
        # Only now: a host whose cable is in nothing is cut off, for as long as a program starts.
        network.ip("link", "set", host.port, "nomaster")
        self._program.go_on()

    def __enter__(self) -> Delay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._program.kill()
        self._host.network.ip("link", "set", self._host.port, "master", "br0")
        self._host.network.ip("link", "delete", self._inner)
        self._host.wait_until_up()
