"""Pages of the documentation whose snippets are run, as the one script that they are together."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str) -> list[str]:
    """The Python snippets of a page in ``docs``, in their order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def script_without_context(page: str) -> str:
    """The snippets of a page as one script, without the line that makes ``ctx``: each rank of a
    world brings its own."""
    return "\n".join(snippets(page)).replace("ctx = potluck.init()", "")
