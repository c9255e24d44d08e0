"""examples/rollouts.py, whose worker 1 is killed after three rollouts; the learner goes on until it
is back and has played.

rollouts_killed.py FOLDER ARGUMENTS of rollouts.py
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import rollouts  # type: ignore[import-not-found]

_, folder, *sys.argv[1:] = sys.argv
was_killed, is_back = Path(folder) / "was_killed", Path(folder) / "is_back"
play, play_for, is_learned = rollouts.play, rollouts.play_for, rollouts.is_learned
learners: list[Any] = []
num = 0


def played_for(ctx: Any) -> None:
    """On players. The second life of worker 1 begins once it is in a group."""

    def watched(*given: Any) -> Any:
        global num
        num += 1
        if num == 4 and ctx.group.me.worker == "1":
            if not was_killed.exists():
                was_killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            is_back.touch()  # three rollouts of its second life were taken by the learner
        return play(*given)

    rollouts.play = watched
    play_for(ctx)


rollouts.play_for = played_for
rollouts.is_learned = lambda *given: is_back.exists() and is_learned(*given)
rollouts.main()
