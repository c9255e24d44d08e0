"""An all_reduce of tensors on a GPU between the workers of one machine, against Gloo's.

    potluck run --workers 2 benchmarks/cuda_all_reduce.py

Both copy tensors through host memory. NCCL, which does not, needs a GPU for each worker. The two
take turns, and each gets its median. The workers of one GPU share the bus to it.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

NUM_ROUNDS, NUM_WARM = 15, 3
SIZES = (4 << 10, 1 << 20, 16 << 20, 128 << 20)


def seconds(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    dist.init_process_group("potluck", init_method="potluck://")
    groups = {"potluck": None, "gloo": dist.new_group(backend="gloo")}
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name()
        print(f"{dist.get_world_size()} workers on {name}, {NUM_ROUNDS} rounds")
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4, device="cuda")
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(NUM_ROUNDS + NUM_WARM):
            for name, group in groups.items():
                times[name].append(seconds(tensor, group))
        mine, other = (statistics.median(each[NUM_WARM:]) * 1e3 for each in times.values())
        if dist.get_rank() == 0:
            both = f"potluck {mine:9.3f} ms, Gloo {other:9.3f} ms"
            print(f"{nbytes:>11} bytes: {both}, {other / mine:.2f}x")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
