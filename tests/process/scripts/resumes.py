"""Trains with plain torch, saves each step, and dies once: ``resumes.py FOLDER INIT_METHOD``.

Under ``torchrun --max-restarts`` the whole world is started again and goes on from the checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, DIES_AFTER = 8, 3

saved = Path(sys.argv[1], "state.pt")
dist.init_process_group("potluck", init_method=sys.argv[2])
rank = dist.get_rank()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
first = 0
if saved.exists():
    state = torch.load(saved)
    net.load_state_dict(state["net"])
    first = state["step"]
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(f"rank {rank}, restart {restarts}: begins at step {first}", flush=True)

for step in range(first, STEPS):
    if rank == 1 and step == DIES_AFTER and not restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(1000 * rank + step)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if rank == 0:
        half = saved.with_suffix(".half")
        torch.save({"net": net.state_dict(), "step": step + 1}, half)
        half.replace(saved)
    dist.barrier()

norm = torch.cat([p.detach().flatten() for p in net.parameters()]).norm().item()
print(f"rank {rank}, restart {restarts}: ends at step {STEPS} with norm {norm:.6f}", flush=True)
dist.destroy_process_group()
