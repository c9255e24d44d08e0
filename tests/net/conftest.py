"""Clusters that tests of a file share, those that leave all agents up and in one view, and change
nothing of their cables, homes and members. Jobs and files of the tests before may be there.

Such tests stand at the end of their file: the agents take processor time as long as they are up.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.machines import Machine, cluster_of, form


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, forked_workers: None) -> Iterator[list[Machine]]:
    """Two machines in one view."""
    with cluster_of(2, tmp_path_factory.mktemp("pair")) as made:
        form(*made)
        yield made


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, forked_workers: None) -> Iterator[list[Machine]]:
    """Three machines in one view."""
    with cluster_of(3, tmp_path_factory.mktemp("trio")) as made:
        form(*made)
        yield made
