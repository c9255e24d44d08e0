"""What ``potluck services`` shows."""

from __future__ import annotations

import pytest

from potluck._core.wire.local import ServiceInfo, ServicesReply
from potluck._core.wire.peers import ServedService
from potluck.cli.services import _show


def test_a_table_names_services_machines_and_nodes_that_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    service = ServedService("images", ("batch", "count"), 4711)
    _show(ServicesReply((ServiceInfo("a" * 64, "attic", "10.0.0.2", service),), 3, ("b" * 64,)))
    out, err = capsys.readouterr()
    for text in ("images", "attic", "aaaaaaaaaaaa", "10.0.0.2 port 4711", "batch, count"):
        assert text in out
    assert "node bbbbbbbbbbbb did not answer" in err
    assert "3 more services do not fit" in err
    _show(ServicesReply())
    assert "No program serves anything" in capsys.readouterr().out
