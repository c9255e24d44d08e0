"""Backends named by device type: each device gets the one that was named, or there is an error."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from potluck.errors import ConfigurationError
from potluck.torch.process_group.group import PotluckProcessGroup


def make(backend: str) -> None:
    store, patience = dist.HashStore(), datetime.timedelta(seconds=30)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=patience)


@pytest.mark.parametrize(
    ("backend", "other"),
    [
        ("cpu:potluck,cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:potluck", "gloo"),
        ("meta:gloo,cpu:potluck,cuda:nccl", "gloo and nccl"),
    ],
)
def test_potluck_beside_another_backend_is_refused_with_what_to_do_instead(
    backend: str, other: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(backend)
    assert f'backend="{backend}"): potluck can\'t share a group with {other}' in str(caught.value)
    assert 'new_group(backend="potluck")' in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["potluck", "cpu:potluck", "cpu:potluck,cuda:potluck"])
def test_potluck_alone_may_be_named_by_device(backend: str) -> None:
    make(backend)
    try:
        group = dist.group.WORLD
        assert isinstance(group, PotluckProcessGroup)
        assert group._get_backend(torch.device("cpu")) is group
        with pytest.raises(ConfigurationError, match=r"new_group\(backend="):
            dist.new_group(backend="cpu:gloo,cuda:potluck")
    finally:
        dist.destroy_process_group()


def test_each_backend_has_its_own_group_as_the_error_says() -> None:
    make("gloo")
    try:
        ours = dist.new_group(backend="potluck")
        assert isinstance(ours, PotluckProcessGroup)
        assert (dist.get_backend(), dist.get_backend(ours)) == ("gloo", "potluck")
        for group in (None, ours):
            mine = torch.ones(2)
            dist.all_reduce(mine, group=group)
            assert mine.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
