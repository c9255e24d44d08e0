"""`is_installed.py EXTRA,EXTRA`: exit status 0 if this environment has potluck and these extras."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
needed = [*project["dependencies"]]
for name in sys.argv[1].split(","):
    needed += extras[name]
pinned = [
    line
    for line in Path("constraints.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
missing = []
for line in [*needed, *pinned]:
    requirement = Requirement(line.strip())
    try:
        fits = requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        fits = line in pinned  # a constraint installs nothing
    if requirement.marker is None or requirement.marker.evaluate():
        missing += [] if fits else [line]
groups = {"console_scripts": project["scripts"], **project["entry-points"]}
entries = {(group, *item) for group, items in groups.items() for item in items.items()}
there = {(each.group, each.name, each.value) for each in distribution("potluck").entry_points}
sys.exit(bool(missing) or entries != there)
