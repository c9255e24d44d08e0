"""Pages of the documentation whose snippets are run, as the one script that they are together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from potluck.context import DistributedContext

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str) -> list[str]:
    """The Python snippets of a page in ``docs``, in their order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_by_rank(page: str) -> Callable[[DistributedContext], None]:
    """A function that runs the whole script of a page on one rank of a world: the rank's context
    takes the place of the one that the script makes."""
    script = "\n".join(snippets(page)).replace("ctx = potluck.init()", "")

    def run(ctx: DistributedContext) -> None:
        exec(compile(script, page, "exec"), {"ctx": ctx, "__name__": "page"})

    return run
