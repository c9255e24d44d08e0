"""The node's key file: made once, kept private, and clear about what is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from potluck._core.cluster.trust.credentials import (
    KEY_FILE,
    load_credentials,
    load_or_create_identity,
)
from potluck._core.settings import Settings
from potluck.errors import IdentityError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def raw(home: Path) -> bytes:
    return load_or_create_identity(home).private_bytes_raw()


def test_a_newcomer_gets_a_key_that_only_its_owner_can_read(home: Path) -> None:
    first = raw(home)
    assert (home / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert raw(home) == first
    assert [path.name for path in home.iterdir()] == [KEY_FILE], "no temporary file is left"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_can_read_is_refused_with_the_command_that_mends_it(
    home: Path, mode: int
) -> None:
    raw(home)
    (home / KEY_FILE).chmod(mode)
    with pytest.raises(IdentityError, match=f"chmod 600 {home / KEY_FILE}"):
        raw(home)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root for chown")
def test_a_key_that_belongs_to_somebody_else_is_refused(home: Path) -> None:
    raw(home)
    os.chown(home / KEY_FILE, 12345, 12345)
    with pytest.raises(IdentityError, match="belongs to user 12345"):
        raw(home)


OTHER_KIND_OF_KEY = generate_private_key(SECP256R1()).private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
)


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\xff" * 200, OTHER_KIND_OF_KEY], ids=["empty", "text", "ff", "ec"]
)
def test_a_damaged_key_is_not_replaced_but_reported(home: Path, content: bytes) -> None:
    raw(home)
    (home / KEY_FILE).write_bytes(content)
    with pytest.raises(IdentityError, match=r"is damaged.*backup"):
        raw(home)
    assert (home / KEY_FILE).read_bytes() == content


def test_every_cut_of_the_key_file_is_damage(home: Path) -> None:
    raw(home)
    whole = (home / KEY_FILE).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        (home / KEY_FILE).write_bytes(whole[:length])
        with pytest.raises(IdentityError, match="damaged"):
            raw(home)


def test_threads_that_race_for_the_first_key_all_get_the_same(home: Path) -> None:
    barrier = threading.Barrier(16)
    keys: list[bytes] = []

    def race() -> None:
        barrier.wait()
        keys.append(raw(home))

    threads = [threading.Thread(target=race) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 16
    assert len(set(keys)) == 1
    assert [path.name for path in home.iterdir()] == [KEY_FILE]


RACER = """
import sys
from pathlib import Path
from potluck._core.cluster.trust.credentials import load_credentials
from potluck._core.settings import Settings
sys.stdin.read()
mine = load_credentials(Settings(home=Path(sys.argv[1])))
print(mine.node_id, mine.namespace)
"""


def test_processes_that_start_together_are_one_node_of_one_cluster(home: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()
        racer.stdin = None
    said = {racer.communicate(timeout=200)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 4
    mine = load_credentials(Settings(home=home))
    assert said == {f"{mine.node_id} {mine.namespace}\n"}


def test_a_home_that_can_not_be_made_is_named_with_the_variable_that_moves_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(IdentityError, match=r"file/home.*(POTLUCK_HOME|can't be opened)"):
        raw(tmp_path / "file" / "home")


@pytest.mark.parametrize("text", ["No space left on device", "Read-only file system"])
def test_a_full_or_read_only_disk_leaves_no_half_a_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(fd: int) -> None:
        raise OSError(28, text)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(IdentityError, match=f"{text}.*POTLUCK_HOME"):
        raw(home)
    assert list(home.iterdir()) == []


def test_a_directory_in_the_place_of_the_key_is_refused(home: Path) -> None:
    (home / KEY_FILE).mkdir(parents=True)
    with pytest.raises(IdentityError, match="is not a file"):
        raw(home)


def test_a_pipe_in_the_place_of_the_key_is_refused_and_not_waited_for(home: Path) -> None:
    home.mkdir()
    os.mkfifo(home / KEY_FILE, 0o600)
    with pytest.raises(IdentityError, match="is not a file"):
        raw(home)


def test_a_link_to_nowhere_is_reported(home: Path) -> None:
    home.mkdir()
    (home / KEY_FILE).symlink_to(home / "gone")
    with pytest.raises(IdentityError, match="node_keypair"):
        raw(home)
