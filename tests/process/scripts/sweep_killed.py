"""examples/sweep.py, a worker of which is killed in the middle of a trial, once.

sweep_killed.py FOLDER WORKER EPOCHS ARGUMENTS of sweep.py; the worker dies after so many epochs.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import sweep  # type: ignore[import-not-found]

import potluck
from support.commands import comes_true

_, folder, worker, epochs, *sys.argv[1:] = sys.argv
was_killed = Path(folder) / "was_killed"
train_epoch, init = sweep.train_epoch, potluck.init
num = 0


def watched(*given: Any) -> None:
    global num
    if me != worker and "--spans-workers" not in sys.argv:  # else they might take all trials
        assert comes_true(was_killed.exists, 200)
    train_epoch(*given)
    num += 1
    if num == int(epochs) and me == worker and not was_killed.exists():
        was_killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def named(*given: Any, **options: Any) -> Any:
    global me
    ctx = init(*given, **options)
    me = ctx.group.me.worker
    return ctx


sweep.train_epoch, potluck.init = watched, named
sweep.main()
