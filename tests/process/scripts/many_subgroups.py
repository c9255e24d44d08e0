"""One rank of two: makes sub-groups, uses each for one all_reduce, and destroys it; nothing grows.

many_subgroups.py RANK PORT ROUNDS SHARED_MEMORY...

Once for each value of POTLUCK_USE_SHARED_MEMORY, one after the other: importing takes the longest.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from potluck.torch.process_group.group import PotluckProcessGroup

WARM_UP = 300


def main() -> None:
    rank, port, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for number, kind in enumerate(sys.argv[4:]):
        os.environ["POTLUCK_USE_SHARED_MEMORY"] = kind
        own = dist.PrefixStore(f"{number}", store)
        dist.init_process_group("potluck", store=own, rank=rank, world_size=2)
        grown = measure(rank, rounds)
        dist.barrier()
        dist.destroy_process_group()
        print(f"nothing is left over with {kind} ({grown:.0f} bytes a group)")


def measure(rank: int, rounds: int) -> float:
    """By how many bytes this process grows for each group; fails if that is too much."""
    gone = [one(rank, number) for number in range(WARM_UP)]
    gc.collect()
    assert not any(group() for group in gone), "something keeps a group that was destroyed"
    del gone
    before, resident = held(), resident_bytes()
    gc.disable()  # nothing waits for the garbage collector
    for number in range(rounds):
        one(rank, number)
    gc.enable()
    grown = (resident_bytes() - resident) / rounds
    assert held() == before, (held(), before)
    assert grown < 350, f"{grown:.0f} bytes a group"  # 9,000 to 20,000 when groups were kept
    world = dist.group.WORLD
    assert isinstance(world, PotluckProcessGroup)
    resources = world.communicator._shared
    assert not resources.keyed
    assert len(resources.sequences) <= WARM_UP + rounds, "a number for each name"
    return grown


def one(rank: int, number: int) -> weakref.ref[dist.ProcessGroup]:
    # Of every ten groups nine have names that are never used again, and one the same as before.
    has_same_name = number % 10 == 0
    part = dist.new_group([0, 1], use_local_synchronization=has_same_name)
    assert isinstance(part, PotluckProcessGroup)
    mine = torch.full((4,), float(number + rank))
    work = dist.all_reduce(mine, group=part, async_op=number % 3 == 0)
    if number % 2:
        dist.destroy_process_group(part)  # maybe amid the call
    if work is not None:
        work.wait()
    assert mine.tolist() == [2.0 * number + 1] * 4
    if not number % 2:
        dist.destroy_process_group(part)
    # torch keeps an empty list for each tag of a group that there was.
    tags = distributed_c10d._world.tags_to_pg
    for tag in [tag for tag, groups in tags.items() if not groups]:
        del tags[tag]
    return weakref.ref(part)


def held() -> dict[str, int]:
    with open("/proc/self/maps") as maps:
        shared = sum("memfd" in line or "/dev/shm" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "mappings of shared memory": shared,
        "files in /dev/shm": len([name for name in os.listdir("/dev/shm") if "potluck" in name]),
    }


def resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("this kernel tells no Pss_Anon")


if __name__ == "__main__":
    main()
