"""What says the needs of a script: its block, locks, requirements; which of several counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck._core.cluster.environments.planning import choose_python
from potluck._core.cluster.environments.sources import Source, find_source
from potluck.errors import ConfigurationError

BLOCK = '# /// script\n# requires-python = ">=3.12"\n# dependencies = ["foo"]\n# ///\nimport foo\n'


def found(root: Path, script: str = "train.py") -> Source:
    source = find_source(root, root / script)
    assert source is not None
    return source


def test_a_script_without_any_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import foo\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")  # without uv.lock
    assert find_source(tmp_path, tmp_path / "train.py") is None


def test_the_block_of_a_script_goes_first_with_its_lock(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BLOCK)
    (tmp_path / "requirements.txt").write_text("bar\n")
    assert found(tmp_path) == Source("script", script, ">=3.12", (script,))
    lock = tmp_path / "train.py.lock"
    lock.write_text("")
    assert found(tmp_path) == Source("script lock", script, ">=3.12", (script, lock))


def test_a_file_goes_before_later_kinds_and_before_folders_above(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text("")
    for name in ("requirements.txt", "pylock.toml", "pyproject.toml"):
        (tmp_path / name).write_text("")
    assert found(tmp_path, "deep/train.py").label == "pylock.toml"
    (tmp_path / "uv.lock").write_text('requires-python = "==3.12.*"\n')
    source = found(tmp_path, "deep/train.py")
    assert (source.label, source.requires_python) == ("uv.lock", "==3.12.*")
    (tmp_path / "deep" / "requirements.txt").write_text("")
    assert found(tmp_path, "deep/train.py").kind == "requirements"
    (tmp_path / "deep" / "requirements.txt").unlink()
    assert find_source(tmp_path / "deep", tmp_path / "deep" / "train.py") is None


def test_included_requirements_belong_to_the_source(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "requirements.txt").write_text("-r more.txt\nfoo\n")
    (tmp_path / "more.txt").write_text("-c bounds.txt\n-r more.txt\n")
    names = [path.name for path in found(tmp_path).files]
    assert names == ["requirements.txt", "more.txt", "bounds.txt"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train.py": "# /// script\n# dependencies = [\n# ///\n"}, "train.py .* is damaged"),
        ({"train.py": BLOCK + BLOCK}, "two blocks"),
        ({"train.py": "", "pylock.toml": "x ="}, "pylock.toml .* is damaged"),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        find_source(tmp_path, tmp_path / "train.py")


def test_the_python_of_a_script_is_this_one_if_it_fits() -> None:
    assert choose_python("", "3.11.7") == "3.11"
    assert choose_python(">=3.10", "3.13.0rc1") == "3.13"
    assert choose_python(">=3.12", "3.11.7") == "3.12"
    assert choose_python("~=3.12.4", "3.13.1") == "3.12"
    with pytest.raises(ConfigurationError, match=r"requires Python <3\.11; potluck runs on 3\.11"):
        choose_python("<3.11", "3.11.7")
    with pytest.raises(ConfigurationError, match="requires-python 'three'"):
        choose_python("three", "3.11.7")
