"""Run examples of front ends in this process: ``front_ends.py A.py ARGS , B.py ARGS``.

Each leaves a process group and settings behind, which a script of its own would not find.
"""

import runpy
import sys

import torch.distributed as dist
from accelerate.state import AcceleratorState

command: list[str] = []
for word in [*sys.argv[1:], ","]:
    if word != ",":
        command.append(word)
        continue
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    command = []
