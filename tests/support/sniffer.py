"""What crosses a host's cable: every frame, and the TCP streams in it.

with Sniffer(host, tmp_path) as sniffer:
    ...                                    # traffic
    capture = sniffer.stop()
assert b"secret" not in capture.everything
"""

from __future__ import annotations

import ipaddress
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from potluck._core.transport.knock import CALL_BYTES
from support.bridge import BridgeProgram
from support.hosts import Host

Stream = tuple[str, int, str, int]
"""Whence and where: address, port, address, port."""

_SCRIPT = """
import select, socket, struct, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: miss nothing
sock.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb") as file:
    print("listening", flush=True)
    while True:
        ready = select.select([sock, sys.stdin], [], [])[0]
        if sock in ready:
            data = sock.recv(1 << 17)
            file.write(struct.pack("!I", len(data)) + data)
        elif sys.stdin in ready:
            break
"""
_TCP, _IPV4, _IPV6 = 6, 0x0800, 0x86DD


@dataclass(slots=True)
class Capture:
    """``everything`` is all frames, one after the other; ``streams`` the bytes of TCP streams."""

    everything: bytes = field(repr=False)
    num_frames: int
    streams: dict[Stream, bytes] = field(repr=False)

    def after_the_call(self) -> dict[Stream, int]:
        """For each direction of each TCP connection in which bytes went: how many of them were more
        than the first message of a knock. All 0: nobody was answered."""
        return {stream: max(0, len(data) - CALL_BYTES) for stream, data in self.streams.items()}


class Sniffer:
    """Listens at the bridge's end of ``host``'s cable; the frames are kept in ``folder``."""

    def __init__(self, host: Host, folder: Path) -> None:
        self._file = folder / f"sniffed-{host.index}"
        arguments = (host.port, str(self._file))
        self._program = BridgeProgram(host.network, _SCRIPT, *arguments, ready="listening")

    def stop(self) -> Capture:
        """Stop listening; what was heard."""
        self._program.finish()
        return read_capture(self._file.read_bytes())

    def __enter__(self) -> Sniffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._program.kill()


def read_capture(data: bytes) -> Capture:
    """The frames of a file of the sniffer, each after its length (4 bytes, big-endian)."""
    pieces: dict[Stream, dict[int, bytes]] = defaultdict(dict)
    frames = []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("!I", data, at)
        frame = data[at + 4 : at + 4 + size]
        at += 4 + size
        frames.append(frame)
        segment = _segment(frame)
        if segment is not None and segment[2]:
            stream, number, payload = segment
            pieces[stream].setdefault(number, payload)
    streams = {stream: _joined(each) for stream, each in pieces.items()}
    return Capture(b"".join(frames), len(frames), streams)


def _segment(frame: bytes) -> tuple[Stream, int, bytes] | None:
    """Stream, sequence number and payload of a frame with TCP."""
    (kind,) = struct.unpack_from("!H", frame, 12)
    packet = frame[14:]
    if kind == _IPV4 and packet[9] == _TCP:
        header, (length,) = (packet[0] & 15) * 4, struct.unpack_from("!H", packet, 2)
        source, target = packet[12:16], packet[16:20]
        tcp = packet[header : length or None]
    elif kind == _IPV6 and packet[6] == _TCP:
        (length,) = struct.unpack_from("!H", packet, 4)
        source, target = packet[8:24], packet[24:40]
        tcp = packet[40 : 40 + length] if length else packet[40:]
    else:
        return None
    from_port, to_port, number = struct.unpack_from("!HHI", tcp)
    hosts = [str(ipaddress.ip_address(each)) for each in (source, target)]
    return (hosts[0], from_port, hosts[1], to_port), number, tcp[(tcp[12] >> 4) * 4 :]


def _joined(pieces: dict[int, bytes]) -> bytes:
    """The bytes in order; what was sent again is taken once."""
    first = next(iter(pieces))
    stream = bytearray()
    for number in sorted(pieces, key=lambda each: (each - first) & 0xFFFFFFFF):
        begin = (number - first) & 0xFFFFFFFF
        if begin <= len(stream):
            stream[begin : begin + len(pieces[number])] = pieces[number]
    return bytes(stream)
