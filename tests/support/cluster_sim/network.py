"""The simulated network and its clock: one queue of events, and links that can be made worse."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass


class Queue:
    """Events in the order of their time; ties in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action = heapq.heappop(heap)
            action()
        self.now = until


@dataclass(slots=True)
class Wire:
    """One direction between two hosts. ``cut`` counts the faults that hold it cut."""

    delay_s: float
    jitter_s: float
    loss: float = 0.0
    doubled: float = 0.0
    cut: int = 0


class Network:
    """All wires, both directions of each pair."""

    def __init__(self, queue: Queue, chance: random.Random, hosts: list[str]) -> None:
        self.queue = queue
        self.hosts = hosts
        self._chance = chance
        self.wires: dict[tuple[str, str], Wire] = {}
        for a in hosts:
            for b in hosts:
                if a != b:
                    self._lay(a, b)

    def add(self, name: str) -> None:
        """One more host, with wires to all others."""
        for other in self.hosts:
            self._lay(name, other)
            self._lay(other, name)
        self.hosts = [*self.hosts, name]

    def _lay(self, a: str, b: str) -> None:
        delay = self._chance.uniform(0.0002, 0.004)
        self.wires[a, b] = Wire(delay, delay * self._chance.random())

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Have ``deliver`` called when the message arrives: later, twice, or not at all."""
        wire = self.wires[source, target]
        chance = self._chance
        copies = 1
        if wire.loss and chance.random() < wire.loss:
            copies = 0
        if wire.doubled and chance.random() < wire.doubled:
            copies += 1
        for _ in range(copies):
            if not wire.cut:
                delay = wire.delay_s + wire.jitter_s * chance.random()
                self.queue.at(self.queue.now + delay, deliver)

    def joined(self, a: str, b: str) -> bool:
        """Whether neither direction between two hosts is cut."""
        return not self.wires[a, b].cut and not self.wires[b, a].cut

    def heal(self) -> None:
        """Back to a quiet network."""
        for wire in self.wires.values():
            wire.cut, wire.loss, wire.doubled = 0, 0.0, 0.0
            wire.delay_s, wire.jitter_s = 0.001, 0.0005
