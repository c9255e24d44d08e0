"""A home that others may write is no place for keys."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck._core.cluster.content.package import Content
from potluck._core.cluster.content.store import Terms
from potluck._core.cluster.home.keyfile import check_private, make_private
from potluck._core.cluster.home.node_state import NodeState, PrivateState
from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck._core.cluster.trust.known_nodes import KnownNodes
from potluck._core.cluster.trust.secret import load_or_create_secret
from potluck.errors import IdentityError
from support.requests import Nodes


def run_alone(home: Path) -> None:
    state = PrivateState(home)
    try:
        state.listening(1)
    finally:
        state.close()


def fetch(home: Path) -> None:
    store = Nodes().store(home / "content", "me")
    shelf = store.open("code", Terms())
    shelf.write(Content(hashlib.sha256(b"").digest(), 0), 0, b"")


USERS: dict[str, Callable[[Path], object]] = {
    "the key": load_or_create_identity,
    "the secret": load_or_create_secret,
    "nodes that were met": lambda home: KnownNodes(home).meet("a1" * 32),
    "an agent": lambda home: NodeState(home).close(),
    "potluck run": run_alone,
    "packages": fetch,
}


@pytest.fixture(autouse=True)
def everybody_writes() -> object:
    before = os.umask(0)  # as wrong as it can be
    yield
    os.umask(before)


@pytest.mark.parametrize("use", USERS.values(), ids=USERS.keys())
def test_a_missing_home_is_made_for_its_owner_only(
    tmp_path: Path, use: Callable[[Path], object]
) -> None:
    home = tmp_path / "a" / "home"
    use(home)
    for folder in (home.parent, home, *(each for each in home.rglob("*") if each.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o720, 0o702, 0o1777])
@pytest.mark.parametrize("use", list(USERS.values())[:4], ids=list(USERS)[:4])
def test_a_home_that_others_may_write_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, use: Callable[[Path], object], mode: int
) -> None:
    home = tmp_path / "home"
    use(home)
    home.chmod(mode)
    with pytest.raises(IdentityError) as caught:
        use(home)
    assert str(caught.value) == (
        f"{home} can be changed by other users (mode {mode:04o}), who could replace this node's "
        f"keys there; run: chmod go-w {home}"
    )
    home.chmod(mode & ~0o022)
    use(home)


@pytest.mark.parametrize(("folder", "use"), [("run", "potluck run"), ("content/code", "packages")])
def test_so_is_a_folder_in_it(tmp_path: Path, folder: str, use: str) -> None:
    USERS[use](tmp_path)
    (tmp_path / folder).chmod(0o770)
    with pytest.raises(IdentityError, match=f"chmod go-w {tmp_path}/{folder}"):
        USERS[use](tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_home_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(make_private(tmp_path / "home"), 12345, -1)
    with pytest.raises(IdentityError, match=r"belongs to user 12345, .* POTLUCK_HOME"):
        load_or_create_identity(tmp_path / "home")


def test_a_home_that_others_may_read_is_fine(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    check_private(tmp_path)
    check_private(tmp_path / "not there")
