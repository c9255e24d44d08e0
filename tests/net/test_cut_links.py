"""A firewall cuts the links between the workers of two of three machines."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from support.figures import Figures
from support.gossiping import goes_on_without_the_link
from support.machines import Machine, cluster_of, form

pytestmark = [pytest.mark.needs_root_netns, pytest.mark.timeout(300)]

PEER_TIMEOUT_S = "8"
"""After which an operation, and the making of a link, is given up."""


@pytest.mark.parametrize("pair", [(1, 2), (0, 2)], ids=["two others", "with the starter"])
def test_gossip_goes_on_when_a_firewall_keeps_the_workers_of_two_machines_apart(
    pair: tuple[int, int], tmp_path: Path, figures: Figures
) -> None:
    with cluster_of(3, tmp_path / "homes", POTLUCK_PEER_TIMEOUT_S=PEER_TIMEOUT_S) as trio:
        form(*trio)
        a, b = (trio[index] for index in pair)
        fault = "a firewall between the workers of two of three hosts"
        goes_on_without_the_link(trio, partial(keep_apart, a, b), fault, tmp_path, figures)


def keep_apart(a: Machine, b: Machine, *, on: bool = True) -> None:
    """Let a firewall drop what the workers of one send to those of the other."""
    for here, there in itertools.permutations((a, b)):
        here.host.drop_workers(there.host, on=on)
