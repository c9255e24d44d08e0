"""The memory of a step: measured for each sample, predicted, and held to the limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from torch import nn
from potluck._core.room import own_room
from potluck.torch.room import StepMemory

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
    def forward(self, x):
        return (x * self.scale).tanh()

torch.set_num_threads(1)
model = nn.Sequential(*(Layer() for _ in range(6)))
limit = own = None

def step(num):
    memory.begin(num)
    x = torch.ones(num, 4096, 64)
    loss = model(x).mean()
    loss.backward()
    return memory.sample_bytes

def set_limit(left):
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.RLIM_INFINITY))
    used = own_room().used
    resource.setrlimit(resource.RLIMIT_DATA, (used + left, resource.RLIM_INFINITY))

set_limit(1 << 38)
memory = StepMemory(model)
assert memory.most() == 0, "nothing is known before a step"
step(2)  # autograd starts its threads
step(4)
measured = step(4)
assert abs(step(16) / measured - 1) < 0.1, (step(16), measured)
set_limit(600 << 20)
step(4)
most = memory.most()
before, limit = memory.fixed_bytes, own_room().limit
step(most)
used = memory.fixed_bytes + memory.sample_bytes * most
predicted = before + measured * most
assert abs(predicted / used - 1) < 0.1, (predicted, used)
set_limit(int(step(8) * 8) + (10 << 20))
try:
    step(8)
except MemoryError as error:
    assert "are needed beside them" in str(error)
else:
    raise AssertionError("it leaves too little")
step(1)
memory.close()
step(8)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no limit of private memory")
def test_a_step_is_measured_predicted_within_a_tenth_and_held_to_the_limit() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
