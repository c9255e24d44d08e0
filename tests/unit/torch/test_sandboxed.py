"""What torch refuses in a sandbox without a network, before its time-outs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from potluck.errors import ConfigurationError  # noqa: E402
from potluck.torch.process_group import sandboxed  # noqa: E402

refused = pytest.raises(ConfigurationError, match="POTLUCK_SANDBOX_NETWORK=yes")


def test_a_store_is_refused_only_where_no_route_leads() -> None:
    sandboxed.check_tcp_store("127.0.0.1", 29500, 2, is_master=True)
    sandboxed.check_tcp_store(host_name="localhost", port=0)
    with refused:
        sandboxed.check_tcp_store("no.such.host.invalid", 29500)


def test_a_file_is_refused_that_other_workers_do_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sandboxed.check_file_store(str(tmp_path / "store"), 2)
    sandboxed.check_file_store("/proc/store", 1)
    with refused:
        sandboxed.check_file_store("/proc/store", 2)
    with refused:  # on two machines
        sandboxed.check_file_store(str(tmp_path / "store"), 4)


def test_in_a_sandbox_torchs_own_classes_ask_first() -> None:
    script = (
        "import torch.distributed as dist\n"
        "print(dist.TCPStore('127.0.0.1', 0, 1, True).port > 0)\n"
        "try: dist.TCPStore('no.such.host.invalid', 1)\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "POTLUCK_BROKER": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["True", "ConfigurationError"], done.stderr
