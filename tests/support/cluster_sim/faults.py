"""Fault plans: what goes wrong, when, to whom, for how long; all from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS_S = 24.0


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` at ``at`` for ``duration`` seconds to ``hosts`` (their meaning depends on it)."""

    kind: str
    at: float
    duration: float
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.at:6.2f} s: {self.kind} {' '.join(self.hosts)} for {self.duration:.2f} s"


KINDS = {
    "cut one way": 3,
    "cut": 3,
    "partition": 4,
    "isolate": 2,
    "kill": 4,
    "power off": 2,
    "freeze": 2,
    "lossy": 2,
    "slow": 2,
    "doubled": 1,
    "ban": 1,
    "continue alone": 1,
    "power cut of all": 1,
}


def make_plan(chance: random.Random, hosts: list[str]) -> list[Fault]:
    """Up to twelve faults, some of them at nearly the same time."""
    plan: list[Fault] = []
    at, num_bans = 0.0, 0
    for _ in range(chance.randint(0, 12)):
        near = bool(plan) and chance.random() < 0.4
        if not near:
            at = chance.uniform(0.5, FAULTS_S - 1)
        when = min(at + (chance.uniform(0, 1.0) if near else 0.0), FAULTS_S - 0.5)
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "ban":
            num_bans += 1
            if num_bans > 1 or len(hosts) < 3:
                continue
        mixed = chance.sample(hosts, len(hosts))
        if kind == "partition":
            chosen = tuple(mixed[: chance.randint(1, len(hosts) - 1)])
        elif kind == "power cut of all":
            chosen = tuple(hosts)
        else:
            chosen = tuple(mixed[:2])
        duration = chance.choice([0.3, 1.0, 2.0, 4.0, 8.0]) * chance.uniform(0.5, 1.5)
        plan.append(Fault(kind, when, min(duration, FAULTS_S - when), chosen))
    return sorted(plan, key=lambda fault: fault.at)


def make_bans(chance: random.Random, hosts: list[str]) -> list[Fault]:
    """Bans of any hosts but one, most of them while the one who bans is cut off from some of the
    others, and beside the faults of ``make_plan``."""
    plan = [fault for fault in make_plan(chance, hosts) if fault.kind != "ban"]
    mixed = chance.sample(hosts, len(hosts))
    victims = mixed[: chance.randint(1, len(hosts) - 1)]
    for victim in victims:
        operator = chance.choice([host for host in hosts if host not in victims])
        at = chance.uniform(4, FAULTS_S - 2)
        if chance.random() < 0.8:
            side = {operator, *chance.sample(hosts, chance.randint(1, len(hosts)))} - {victim}
            start, duration = at - chance.uniform(0, 3), chance.uniform(1, 8)
            duration = min(duration, FAULTS_S - start)
            plan.append(Fault("partition", start, duration, tuple(sorted(side))))
        plan.append(Fault("ban", at, 0.0, (operator, victim)))
    return sorted(plan, key=lambda fault: fault.at)
