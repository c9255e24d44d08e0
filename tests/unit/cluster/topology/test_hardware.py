"""What this machine is."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil

from potluck._core.cluster.topology import hardware


def test_this_machine_has_cores_memory_and_no_address_that_every_machine_has() -> None:
    facts = hardware.own_facts("me")
    assert facts.node == "me"
    assert 1 <= facts.cores <= (psutil.cpu_count() or 1)
    assert facts.memory_bytes == psutil.virtual_memory().total
    for each in facts.addresses:
        ip = ipaddress.ip_address(each.host)
        assert not ip.is_loopback
        assert ip in ipaddress.ip_network(each.network)
        assert each.interface in psutil.net_if_stats()


def test_gpus_are_named_as_their_drivers_list_them(tmp_path: Path) -> None:
    for bus, model in (("0000:01:00.0", "NVIDIA H100"), ("0000:02:00.0", "NVIDIA H100")):
        (tmp_path / "nvidia" / bus).mkdir(parents=True)
        text = f"Model: \t\t {model}\nIRQ:   \t\t 56\n"
        (tmp_path / "nvidia" / bus / "information").write_text(text)
    assert hardware._nvidia(tmp_path / "nvidia") == ["NVIDIA H100", "NVIDIA H100"]
    for number, name, units in (("0", "", 0), ("1", "gfx1100", 384)):
        (tmp_path / "amd" / number).mkdir(parents=True)
        (tmp_path / "amd" / number / "name").write_text(f"{name}\n")
        text = f"cpu_cores_count 16\nsimd_count {units}\n"
        (tmp_path / "amd" / number / "properties").write_text(text)
    assert hardware._amd(tmp_path / "amd") == ["gfx1100"], "the CPU is no accelerator"
    assert hardware._nvidia(tmp_path / "none") == hardware._amd(tmp_path / "none") == []
