"""`audit.py REPORT`: what a report of pip-audit says about potluck's dependencies.

Exit status 1 if a package that `pip install potluck` brings has a known vulnerability.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from lockfile import LOCK, name_of, needed

IGNORED: dict[str, str] = {}
"""By id: vulnerabilities that do not reach potluck, with the reason."""


def own_packages() -> set[str]:
    """What `pip install potluck` brings, by the comments of the lock on who needs a package."""
    parents: dict[str, set[str]] = {}
    name = ""
    for line in LOCK.read_text().splitlines():
        if re.match(r"[a-zA-Z0-9]", line):
            name = name_of(line)
        elif found := re.match(r"    #(?: via)? +(\S+)$", line):
            parents.setdefault(name, set()).add(name_of(found[1]))
    own = {name_of(each) for each in needed("")}
    while more := {each for each, by in parents.items() if by & own} - own:
        own |= more
    return own


def main(report: Path) -> int:
    found = json.loads(report.read_text())["dependencies"]
    own, bad = own_packages(), 0
    for package in found:
        for vulnerability in package.get("vulns", ()):  # without: PyPI does not know the package
            if vulnerability["id"] in IGNORED:
                continue
            is_own = name_of(package["name"]) in own
            bad += is_own
            fixed = ", ".join(vulnerability["fix_versions"]) or "no release yet"
            print(
                f"potluck: pip-audit: {package['name']} {package['version']} has "
                f"{vulnerability['id']}, fixed in {fixed}"
                + ("" if is_own else " (an extra's or a tool's package)")
            )
    if bad:
        print("potluck: raise its floor in pyproject.toml; run tools/lock --upgrade-package NAME")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
