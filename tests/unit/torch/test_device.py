"""How a machine rounds, in words."""

from __future__ import annotations

import pytest
import torch

from potluck.torch.structure import arithmetic


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_the_system_counts_also_where_a_gpu_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library rounds the learning rates of a schedule."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    device, found = torch.device(kind), set()
    for system, libc in (("Linux", ("glibc", "2.41")), ("Linux", ("musl", "")), ("Windows", ())):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        monkeypatch.setattr("platform.libc_ver", lambda libc=libc: libc)
        found.add(arithmetic(device))
    assert len(found) == 3
    assert arithmetic(device) in found


def test_the_number_of_threads_counts_on_a_processor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    before = [arithmetic(torch.device(kind)) for kind in ("cpu", "cuda")]
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    after = [arithmetic(torch.device(kind)) for kind in ("cpu", "cuda")]
    assert before[0] != after[0]
    assert before[1] == after[1]
