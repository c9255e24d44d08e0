"""What pyproject.toml asks for, and what requirements.lock pins.

`lockfile.py needed EXTRA,EXTRA` prints the requirements of potluck with these extras;
`lockfile.py pinned NAME NAME` prints these packages as pip takes them, with their hashes;
`lockfile.py oldest EXTRA,EXTRA` prints the requirements with each version floor as the version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"


def needed(extras: str) -> list[str]:
    """The requirements of potluck with ``extras``, names with commas; "" for none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["optional-dependencies"][name] for name in extras.split(",") if name]
    return [*project["dependencies"], *(line for group in groups for line in group)]


def name_of(requirement: str) -> str:
    """The normalized name of the package of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", requirement)[0]).lower()


def locked() -> dict[str, list[str]]:
    """By normalized name: each pin, with its marker and its hashes. A package may have several
    pins, for different systems."""
    text = re.sub(r"(?m)^ *#.*\n", "", LOCK.read_text()).replace("\\\n", "")
    pins: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        pins.setdefault(name_of(line), []).append(" ".join(line.split()))
    return pins


def without_hashes(pin: str) -> str:
    """A pin of ``locked`` as a requirement that `packaging` reads."""
    return pin.partition(" --hash")[0]


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    if what == "needed":
        print(*needed(names[0]), sep="\n")
    elif what == "oldest":
        print(*(line.replace(">=", "==") for line in needed(names[0])), sep="\n")
    elif what == "pinned":
        print(*(pin for name in names for pin in locked()[name]), sep="\n")
    else:
        sys.exit(f"lockfile.py: {what!r} is none of needed, oldest, pinned")
