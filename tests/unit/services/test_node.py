"""Which machine's service a program means, and what it is told where there is none."""

from __future__ import annotations

import pytest

from potluck._core.wire.local import ServiceInfo, ServicesReply
from potluck._core.wire.peers import MAX_METHODS, ServedService
from potluck.services.definition import service, services_of
from potluck.services.node import _announced, _elsewhere, _is_on

ADA, EVE = "ad" * 32, "ee" * 32


def on(node: str, machine: str) -> ServiceInfo:
    return ServiceInfo(node, machine, "10.0.0.2", ServedService("images", ("batch",), 4711))


def test_a_node_is_meant_by_its_name_or_the_beginning_of_its_id() -> None:
    for text in ("", "ada", ADA[:8], ADA):
        assert _is_on(text, on(ADA, "ada")), text
    for text in ("eve", "Ada", "ad", "ee", ADA[:7], ADA + "0", EVE):
        assert not _is_on(text, on(ADA, "ada")), text


def test_no_machine_is_taken_for_the_id_of_another_or_for_its_beginning() -> None:
    for text in (ADA, ADA[:8], ADA[:20]):
        assert not _is_on(text, on(EVE, text))


def test_an_error_says_what_the_agents_said() -> None:
    assert _elsewhere(ServicesReply()) == "no machine that is linked serves it"
    reply = ServicesReply((on(ADA, "ada"),), silent=(EVE,))
    said = "node ada (adadadad) serves it; no answer came from eeeeeeee"
    assert _elsewhere(reply) == said


def test_more_than_other_machines_take_is_a_mistake_of_the_caller() -> None:
    many = type("Many", (), {f"m{n}": lambda self, call: None for n in range(MAX_METHODS + 1)})
    wrong = {"methods": service("many")(many)()}
    wrong["long"] = service("long")(type("Long", (), {"m" * 65: lambda self, call: None}))()
    for thing in wrong.values():
        with pytest.raises(ValueError, match="can't be announced to other machines"):
            _announced(services_of(thing), 1)
