"""One rank of two: makes the default group and ends it again and again; nothing may be left over.

many_groups.py RANK FOLDER ROUNDS
"""

from __future__ import annotations

import gc
import os
import sys
import threading

import torch
import torch.distributed as dist

WARM_UP = 5


def main() -> None:
    rank, folder, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    left: list[tuple[int, int]] = []
    for number in range(WARM_UP + rounds):
        store = dist.FileStore(f"{folder}/{number}", 2)
        dist.init_process_group("potluck", store=store, rank=rank, world_size=2)
        part = dist.new_group([0, 1])
        mine = torch.ones(4)
        dist.all_reduce(mine)
        dist.all_reduce(mine, group=part, async_op=True).wait()
        assert mine.tolist() == [4.0] * 4
        end(number, rank)
        assert not dist.is_initialized()
        del part, store
        gc.collect()
        left.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    descriptors, threads = zip(*left[WARM_UP:], strict=True)
    assert max(descriptors) == descriptors[0], descriptors
    assert max(threads) == threads[0], threads
    print("nothing is left over")


def end(number: int, rank: int) -> None:
    """The ways in which libraries end a group, in turn."""
    group = dist.group.WORLD
    assert group is not None
    if number % 3 == 1:
        group.shutdown()
    elif number % 3 == 2 and rank == 0:
        dist.recv(torch.ones(1), 1)  # rank 1 has left the calls before
        group.abort()
    elif number % 3 == 2:
        try:
            dist.send(torch.ones(1), 0)
            dist.barrier()
            raise AssertionError("rank 0 aborted its group, and this one has not heard of it")
        except RuntimeError as error:
            assert "aborted its process group" in str(error), error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
