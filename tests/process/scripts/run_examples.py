"""Run example scripts one after the other in this process: ``run_examples.py A.py ARGS , B.py``.

Under ``potluck run`` that is possible for scripts that make a process group of torch's: a worker
that has closed its context has finished, for its agent.
"""

import runpy
import sys

command: list[str] = []
for word in [*sys.argv[1:], ","]:
    if word != ",":
        command.append(word)
        continue
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    print(f"end of {command[0]}", flush=True)
    command = []
