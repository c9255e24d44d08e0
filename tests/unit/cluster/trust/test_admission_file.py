"""``AdmissionFile``: what one process learns of a list that others write and remove."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck.errors import IdentityError


def test_a_list_that_another_process_makes_or_removes_counts_at_once(tmp_path: Path) -> None:
    file = AdmissionFile(tmp_path)
    assert file.load() is None
    assert file.objects_to("a stranger") is None, "the cluster is open"
    other = AdmissionFile(tmp_path)
    other.found(load_or_create_identity(tmp_path))
    assert "never admitted" in str(file.objects_to("a stranger"))
    other.path.unlink()
    assert file.load() is None


def test_a_list_that_cannot_be_looked_for_lets_nobody_in(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    file = AdmissionFile(home)
    assert file.objects_to("a stranger") is None
    home.rmdir()
    home.write_text("a file where the folder was")
    with pytest.raises(IdentityError, match="list of admitted keys"):
        file.load()
    assert file.objects_to("a stranger")
