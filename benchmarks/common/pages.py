"""The part of a page in docs/ that a benchmark writes, between two comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from potluck.cli.bench.machine import heading


def fill(page: Path, machine: dict[str, Any], body: str, *, name: str = "") -> None:
    """Replace what stands between ``<!-- measured -->`` and ``<!-- end of measured -->`` by the
    machine and ``body``. A ``name`` tells several such parts of a page apart."""
    about = f"measured: {name}" if name else "measured"
    mark, end_mark = f"<!-- {about} -->", f"<!-- end of {about} -->"
    text = page.read_text()
    start, end = text.index(mark) + len(mark), text.index(end_mark)
    where = "\n".join(f"    {line}" for line in heading(machine).splitlines())
    page.write_text(f"{text[:start]}\n{where}\n\n{body}\n{text[end:]}")
    print(f"written into {page.name}")
