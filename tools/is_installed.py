"""`is_installed.py EXTRA,EXTRA`: exit status 0 if this environment has potluck and these extras."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from lockfile import locked, needed, without_hashes
from pip._vendor.packaging.requirements import Requirement

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
pins = [without_hashes(pin) for name, each in locked().items() if name != "pip" for pin in each]
missing = []
for is_pin, line in [*((False, each) for each in needed(sys.argv[1])), *((True, p) for p in pins)]:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        continue
    try:
        fits = requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        fits = is_pin  # a constraint installs nothing
    missing += [] if fits else [line]
groups = {"console_scripts": project["scripts"], **project["entry-points"]}
entries = {(group, *item) for group, items in groups.items() for item in items.items()}
there = {(each.group, each.name, each.value) for each in distribution("potluck").entry_points}
sys.exit(bool(missing) or entries != there)
