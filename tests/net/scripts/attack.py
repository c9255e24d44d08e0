"""attack.py ADDRESS COUNT: a stranger on the network does what it can against the agent there.

500 connections that stay idle; HTTP, random bytes, and lengths of 4 GiB; a scan of 4000 ports;
COUNT forged adverts by mDNS and as many by the beacon. Says how far it is.
"""

import contextlib
import os
import resource
import socket
import sys
import time

from zeroconf import DNSOutgoing, DNSPointer, DNSService, DNSText

from potluck._core.cluster.discovery.advert import Advert
from potluck._core.cluster.discovery.beacon import GROUP4, encode_beacon
from potluck._core.cluster.discovery.mdns import SERVICE

AGENT, MDNS, BEACON = 52415, ("224.0.0.251", 5353), (GROUP4, 52415)
ANSWER, CLASS_IN, POINTER, TEXT, PLACE = 0x8400, 1, 12, 16, 33
JUNK = (
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    os.urandom(70_000),
    b"\xff\xff\xff\xff",
    b"\x16\x03\x01\xff\xff" + bytes(60_000),
)

target, count = sys.argv[1], int(sys.argv[2])


def call(port):
    sock = socket.socket()
    sock.settimeout(30)
    sock.connect((target, port))
    return sock


def in_mdns(advert):
    name, server = f"{advert.instance.hex()}.{SERVICE}", f"{advert.instance.hex()}.local."
    texts = (b"v=2", b"w=%d" % advert.window, b"t=" + advert.tag.hex().encode())
    text = b"".join(bytes([len(each)]) + each for each in texts)
    message = DNSOutgoing(ANSWER)
    message.add_answer_at_time(DNSPointer(SERVICE, POINTER, CLASS_IN, 120, name), 0)
    place = DNSService(name, PLACE, CLASS_IN, 120, 0, 0, advert.port, server)
    message.add_answer_at_time(place, 0)
    message.add_answer_at_time(DNSText(name, TEXT, CLASS_IN, 120, text), 0)
    return message.packets()[0]


resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
print("begins", flush=True)
crowd = [call(AGENT) for _ in range(500)]
for junk in JUNK * 5:
    with contextlib.suppress(ConnectionError):
        crowd.append(call(AGENT))
        crowd[-1].sendall(junk)
found = 0
for port in range(50_000, 54_000):
    with contextlib.suppress(OSError), call(port):
        found += 1
print(f"scanned: {found} open", flush=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
    for number in range(count):
        advert = Advert(2, 6666, os.urandom(16), int(time.time() // 600), os.urandom(16))
        udp.sendto(in_mdns(advert), MDNS)
        udp.sendto(encode_beacon(advert), BEACON)
        if number == count // 2:
            print("half of the flood", flush=True)
print("done", flush=True)
for each in crowd:
    each.close()
