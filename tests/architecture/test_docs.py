"""The documentation: every public name has its place in the reference, the site builds, and a walk
through the code counts the files that it names."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import potluck
import potluck.errors
from potluck._core.settings import Settings, environment_name
from potluck.cli.main import app
from support.ways import WAYS, hops

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
EXTERNAL = re.compile(r"""(?:src=|url\(|@import |<link [^>]*href=)["']?https?://[^"')\s]+""")


def listed(module: str) -> list[str]:
    """``__all__`` of a module, which may not be importable here."""
    place = ROOT / "src" / module.replace(".", "/")
    file = place / "__init__.py"
    if not file.exists():  # the folder of a former package may be left, with caches
        file = place.with_suffix(".py")
    tree = ast.parse(file.read_text())
    [names] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return ast.literal_eval(names)


def public() -> list[str]:
    """Every public name with its module, as a script spells it."""
    modules = ("potluck.torch", "potluck.torch.pipeline", "potluck.training", "potluck.testing")
    modules += ("potluck.data", "potluck.estimators", "potluck.federated")
    modules += ("potluck.parameter_server",)
    names = [f"potluck.{name}" for name in potluck._HOME_OF]
    names += [f"{module}.{name}" for module in modules for name in listed(module)]
    errors = vars(potluck.errors).values()
    names += [f"potluck.errors.{e.__name__}" for e in errors if isinstance(e, type)]
    return names


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds. A warning (a broken link, a page without a place) is an error."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'potluck[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def anchors(folder: Path) -> set[str]:
    pages = "".join(page.read_text() for page in folder.glob("*.html"))
    return set(re.findall(r'id="([^"]+)"', pages))


@pytest.mark.costly
def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    missing = sorted(set(public()) - anchors(site / "reference"))
    assert missing == [], f"name them in {REFERENCE.relative_to(ROOT)}/*.md, with ':::' in front"


@pytest.mark.costly
def test_every_command_and_setting_has_its_place_in_the_reference(site: Path) -> None:
    missing = {f"potluck-{name}" for name in get_command(app).commands} - anchors(
        site / "reference"
    )
    page = (site / "settings.html").read_text()
    variables = set(map(environment_name, Settings.__dataclass_fields__))
    missing |= {name for name in variables if name not in page}
    assert missing == set()


@pytest.mark.costly
def test_a_reader_of_the_site_asks_no_other_machine_for_anything(site: Path) -> None:
    found = {
        f"{page.relative_to(site)}: {match}"
        for kind in ("*.html", "*.css")
        for page in site.rglob(kind)
        for match in EXTERNAL.findall(page.read_text())
    }
    assert found == set()


def test_the_walk_of_a_run_is_short() -> None:
    """``tests/process/test_ways.py`` traces it."""
    training, most_until_training, most = 13, 22, 24
    first_hop: dict[Path, int] = {}
    for hop in hops("run"):
        for path in () if hop.is_beside else hop.files:
            first_hop.setdefault(path, int(hop.number))
    assert sum(hop <= training for hop in first_hop.values()) <= most_until_training
    assert len(first_hop) <= most


def test_the_map_is_one_page() -> None:
    """Neither it nor a way has lines that nobody reads to their end."""
    most_bytes, most_columns, most_of_a_cell = 12_000, 130, 300
    page = ROOT / "ARCHITECTURE.md"
    assert len(page.read_bytes()) <= most_bytes
    too_long = [
        f"{path.name}:{number}"
        for path in (page, *sorted(WAYS.glob("*.md")))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if max(map(len, line.split(" | "))) > most_of_a_cell
        or (len(line) > most_columns and not line.startswith("|"))
    ]
    assert too_long == []
