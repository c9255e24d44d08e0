"""The leak guard in tests/conftest.py sees what it is there to see, and lets good tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

STORIES = """
import os, subprocess, threading, time

import conftest
import pytest

gate = threading.Event()

@pytest.fixture(autouse=True)
def no_grace_for_what_never_goes(request, monkeypatch):
    if request.node.name.startswith("test_bad"):
        monkeypatch.setattr(conftest, "GRACE_S", 0.0)

def test_good_opens_and_closes_everything():
    with open("/dev/null"):
        subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.02,))
    thread.start()

def test_bad_descriptor():
    os.open("/dev/null", os.O_RDONLY)

def test_bad_thread():
    threading.Thread(target=gate.wait, daemon=True).start()

def test_good_again_although_the_thread_is_still_there():
    pass

def test_bad_child_process():
    subprocess.Popen(["sleep", "60"]).returncode = 0

def test_bad_orphan_whose_parent_is_gone():
    subprocess.run(["sh", "-c", "sleep 60 & exit 0"], stdout=subprocess.DEVNULL, check=True)

def test_bad_shared_memory():
    open(f"/dev/shm/potluck-guard-{os.getpid()}", "w").close()

def test_good_beside_a_program_outside_that_has_a_folder_and_a_semaphore_of_joblib():
    outside = os.environ["OUTSIDE"]
    os.mkdir(f"/dev/shm/joblib_memmapping_folder_{outside}_guard")
    open(f"/dev/shm/sem.loky-{outside}-guard", "w").close()

def test_good_at_the_end():
    os.unlink(f"/dev/shm/potluck-guard-{os.getpid()}")
    gate.set()
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the guard reads Linux's /proc")
def test_each_kind_of_leak_fails_its_own_test_and_no_other(tmp_path: Path) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_stories.py").write_text(STORIES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    with subprocess.Popen(["sleep", "300"]) as outside:
        made = (f"joblib_memmapping_folder_{outside.pid}_guard", f"sem.loky-{outside.pid}-guard")
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", tmp_path],
                capture_output=True,
                text=True,
                timeout=200,
                cwd=tmp_path,
                env={**os.environ, "OUTSIDE": str(outside.pid)},
            )
        finally:
            outside.kill()
            folder, semaphore = (Path("/dev/shm", name) for name in made)
            folder.rmdir()
            semaphore.unlink()
    lines = run.stdout.splitlines()
    failed = sorted(line.split("::")[1].split(" ")[0] for line in lines if line[:6] == "ERROR ")
    assert failed == [
        "test_bad_child_process",
        "test_bad_descriptor",
        "test_bad_orphan_whose_parent_is_gone",
        "test_bad_shared_memory",
        "test_bad_thread",
    ], run.stdout + run.stderr
    assert "9 passed, 5 errors" in lines[-1]
    for named in ("descriptor", "thread", "process", "shared memory", "sleep 60"):
        assert named in run.stdout
