"""examples/lora/finetune.py, whose worker 2 is killed in step 3 and is back before step 5 ends.

finetune_killed.py FOLDER ARGUMENTS of finetune.py
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import potluck.torch as pt
from support.commands import comes_true

EXAMPLE = Path(__file__).parents[3] / "examples/lora/finetune.py"
_, folder, *sys.argv[1:] = sys.argv
sys.path.insert(0, str(EXAMPLE.parent))
was_killed = Path(folder) / "was_killed"


class Loop(pt.ElasticLoop):
    def log(self, **facts: Any) -> None:
        """Called once in each step, before its commit."""
        if self.step_number == 3 and self.ctx.group.me.worker == "2" and not was_killed.exists():
            was_killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.step_number == 5 and self.ctx.world_size == 2:
            assert comes_true(lambda: self.ctx.reform_due, 200), "worker 2 is not back"
        super().log(**facts)


pt.ElasticLoop = Loop  # type: ignore[misc]
runpy.run_path(str(EXAMPLE), run_name="__main__")
