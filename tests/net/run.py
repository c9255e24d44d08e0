"""The whole table of faults, the long ones too; writes what was measured into the docs.

    python tests/net/run.py                 # about eight minutes, as root on Linux
    python tests/net/run.py -k killed       # some rows; the pages stay as they are

Figures that were asked for and not reached say so in the table. Exit code: pytest's, or 1 if a
figure was missed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from potluck.cli.bench.machine import heading, machine
from support.figures import Figure, markdown, read_figures

ROOT = Path(__file__).parents[2]
TESTS = ("tests/net", "tests/unit/transport/test_man_in_the_middle.py")
MARK, END_MARK = "<!-- measured on hosts -->", "<!-- end of measured on hosts -->"


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures"
        file.touch()
        command = [sys.executable, "-m", "pytest", *TESTS, "--long", "--figures", str(file)]
        code = subprocess.run([*command, *arguments], cwd=ROOT).returncode
        figures = read_figures(file)
    if not arguments:
        where = heading(machine())
        for page in ("reliability", "security"):
            into_page(page, where, [each for each in figures if each.page == page])
    missed = [each for each in figures if not each.is_reached]
    for each in missed:
        print(f"missed: {each.fault}: {each.text}, asked {each.asked:g}")
    return code or bool(missed)


def into_page(name: str, where: str, figures: list[Figure]) -> None:
    """Replace what stands between the marks of a page."""
    path = ROOT / "docs" / f"{name}.md"
    page = path.read_text()
    start, end = page.index(MARK) + len(MARK), page.index(END_MARK)
    block = "\n".join(f"    {line}" for line in where.splitlines())
    table = f"\n\n{block}\n\n{markdown(figures)}\n\n"
    path.write_text(page[:start] + table + page[end:])
    print(f"written into {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
