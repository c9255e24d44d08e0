"""One rank of the checks: ``run.py RESULTS FOLDER NAME...``, the group as in RANK and its kin.

One line of JSON per check goes into RESULTS. A rank whose check fails leaves at once: the others
then learn that it is lost. A check that does not return in time writes its stacks to stderr.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import harness
import torch
import torch.distributed as dist

DEADLINE_S = 200

for module in sorted(Path(__file__).parent.glob("*_checks.py")):
    text = module.read_text()
    if any(f"def {name}(" in text for name in sys.argv[3:]):
        importlib.import_module(module.stem)


def main() -> None:
    results, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(os.environ.get("CHECKS_BACKEND", "potluck"), timeout=timeout)
    run = harness.Run(dist.get_rank(), dist.get_world_size(), Path(folder))
    with open(results, "a", buffering=1) as file:
        for name in names:
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
            torch.set_default_dtype(torch.float64)
            started = time.perf_counter()
            try:
                harness.CHECKS[name](run)
                dist.barrier()
            except BaseException:
                print(json.dumps({"check": name, "error": traceback.format_exc()}), file=file)
                sys.stdout.flush()
                os._exit(1)
            seconds = round(time.perf_counter() - started, 3)
            print(json.dumps({"check": name, "error": "", "seconds": seconds}), file=file)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


main()
