"""One replica of a training that torchft manages: ``torchft_replica.py LIGHTHOUSE NAME DIES_AT``.

It is killed by its own hand at step DIES_AT; -1: it trains to the end.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager
from torchft.optim import OptimizerWrapper

from potluck.torch import ProcessGroupPotluck

STEPS = 6
lighthouse, name, dies_at = sys.argv[1], sys.argv[2], int(sys.argv[3])

torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def load_state(state):
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])


def state():
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = ProcessGroupPotluck(timeout=timedelta(seconds=30))
manager = Manager(
    pg=group,
    load_state_dict=load_state,
    state_dict=state,
    min_replica_size=2,
    replica_id=name,
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
    lighthouse_addr=lighthouse,
)
managed = OptimizerWrapper(manager, optimizer)

while manager.current_step() < STEPS:
    step = manager.current_step()
    managed.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    if step == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    # torchft 0.2's DistributedDataParallel fails an assertion when a collective raises in a
    # backward, on Gloo too.
    for work in [manager.allreduce(p.grad) for p in net.parameters()]:
        work.wait()
    managed.step()
    if manager.current_step() == step:
        cause = str(manager.errored()).splitlines()[0]
        print(f"replica {name}: step {step} does not count: {cause}", flush=True)

norm = torch.cat([p.detach().flatten() for p in net.parameters()]).norm().item()
print(f"replica {name}: ends at step {STEPS} with norm {norm:.6f}", flush=True)
manager.shutdown()
group.shutdown()
