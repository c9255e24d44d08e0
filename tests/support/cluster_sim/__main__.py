"""The soak: thousands of seeds over all cores; names those that fail and how to see one.

Each seed is three worlds: hosts, disks and networks that fail; a cluster with a liar; and hosts
that are banned while the network is cut.

python -m support.cluster_sim [--first N] [--count N] [--jobs N] [--only WORLD]
python -m support.cluster_sim --show SEED --only WORLD
"""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from support.cluster_sim.liars import LiarWorld
from support.cluster_sim.world import BanWorld, Broken, World

MODULE = "support.cluster_sim"
WORLDS: dict[str, Callable[[int], World]] = {
    "faults": World,
    "liars": LiarWorld,
    "bans": BanWorld,
}


def run_world(world: World) -> str:
    """What is wrong with ``world``, in one line; empty if nothing is."""
    try:
        world.run()
    except Broken as error:
        return str(error).splitlines()[0]
    except Exception as error:
        return f"seed {world.seed}, at {world.queue.now:.2f} s: an agent ended: {error!r}"
    return ""


def run_seed(seed: int, only: str) -> str:
    """What is wrong with ``seed``, in one line; empty if nothing is."""
    found = {name: run_world(kind(seed)) for name, kind in WORLDS.items() if only in (name, "")}
    return "; ".join(f"{name}: {wrong}" for name, wrong in found.items() if wrong)


def work(first: int, end: int, stride: int, only: str) -> None:
    """One process of the soak: a line per seed."""
    for seed in range(first, end, stride):
        print(f"{seed}\t{run_seed(seed, only)}", flush=True)


def soak(first: int, count: int, jobs: int, only: str) -> int:
    """Run ``count`` seeds in ``jobs`` processes; 1 if any failed, 130 when interrupted."""
    started = time.monotonic()
    failed: dict[int, str] = {}
    done = 0
    command = [sys.executable, "-m", MODULE, "--only", only]
    workers = [
        subprocess.Popen(
            [*command, "--work", str(first + i), str(first + count), str(jobs)],
            stdout=subprocess.PIPE,
        )
        for i in range(jobs)
    ]
    interrupted = False
    shown = 0.0
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, bytearray())
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    *lines, rest = bytes(key.data + data).split(b"\n")
                    key.data[:] = rest
                    for line in lines:
                        seed, _, wrong = line.decode().partition("\t")
                        done += 1
                        if wrong:
                            failed[int(seed)] = wrong
                            print(f"\r{wrong}", flush=True)
                if time.monotonic() - shown > 0.5:
                    shown = time.monotonic()
                    print(f"\r{done} of {count} seeds, {len(failed)} failed", end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for worker in workers:
            if interrupted:
                worker.kill()
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
    crashed = [worker.returncode for worker in workers if worker.returncode]
    seconds = time.monotonic() - started
    print(f"\r{done} of {count} seeds in {seconds:.0f} s, {len(failed)} failed")
    if failed:
        print("failing seeds:", " ".join(map(str, sorted(failed))))
        print(f"to see one: python -m {MODULE} --show {min(failed)} --only WORLD")
    if interrupted:
        return 130
    return 1 if failed or crashed or done < count else 0


def show(seed: int, only: str) -> int:
    """Play one seed and print all that happened."""
    world = WORLDS[only or "faults"](seed)
    wrong = run_world(world)
    print("\n".join(world.lines))
    print(wrong or f"seed {seed}: nothing wrong, {world.num_commits} commits")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", choices=["", *WORLDS], default="", help="one kind of world")
    parser.add_argument("--show", type=int, metavar="SEED", help="play one seed, tell all")
    parser.add_argument("--work", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.show is not None:
        return show(given.show, given.only)
    if given.work is not None:
        first, end, stride = given.work
        work(first, end, stride, given.only)
        return 0
    return soak(given.first, given.count, given.jobs, given.only)


if __name__ == "__main__":
    sys.exit(main())
