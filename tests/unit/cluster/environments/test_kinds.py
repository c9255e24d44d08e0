"""Which wheel fits a kind of machine best: as uv and pip rank them."""

from __future__ import annotations

import sys

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from potluck._core.cluster.environments.kinds import own_kind, platform_of, tags_of

CRYPTOGRAPHY = (
    "cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64",
    "cp311-abi3-manylinux_2_28_x86_64",
    "cp311-abi3-manylinux_2_34_x86_64",
    "cp39-abi3-manylinux_2_34_x86_64",
    "cp311-abi3-macosx_11_0_arm64",
    "cp311-abi3-manylinux_2_28_aarch64",
    "cp311-abi3-musllinux_1_2_x86_64",
    "cp311-abi3-win_amd64",
    "py3-none-any",
)


@pytest.mark.parametrize(
    ("kind", "python", "best"),
    [
        ("x86_64-manylinux_2_36", "3.11.7", "cp311-abi3-manylinux_2_34_x86_64"),
        ("x86_64-manylinux_2_31", "3.13.1", "cp311-abi3-manylinux_2_28_x86_64"),
        ("x86_64-manylinux_2_17", "3.12", CRYPTOGRAPHY[0]),
        ("x86_64-manylinux_2_36", "3.10.2", "cp39-abi3-manylinux_2_34_x86_64"),
        ("aarch64-apple-darwin-14.5", "3.12", "cp311-abi3-macosx_11_0_arm64"),
        ("aarch64-manylinux_2_36", "3.12", "cp311-abi3-manylinux_2_28_aarch64"),
        ("x86_64-unknown-linux-musl", "3.12", "cp311-abi3-musllinux_1_2_x86_64"),
        ("x86_64-pc-windows-msvc", "3.12", "cp311-abi3-win_amd64"),
        ("aarch64-manylinux_2_17", "3.12", "py3-none-any"),
    ],
)
def test_the_best_wheel_of_several_that_fit(kind: str, python: str, best: str) -> None:
    tags = tags_of(kind, python)
    ranks = {
        text: min((tags[tag] for tag in found if tag in tags), default=None)
        for text in CRYPTOGRAPHY
        for found in [parse_wheel_filename(f"cryptography-50.0.2-{text}.whl")[3]]
    }
    fit = {text: rank for text, rank in ranks.items() if rank is not None}
    assert min(fit, key=fit.__getitem__) == best


@pytest.mark.skipif(sys.platform != "linux", reason="compares with this interpreter's own tags")
def test_this_machine_ranks_wheels_as_its_own_interpreter_does() -> None:
    """But for wheels that were built on just such a machine (``linux_x86_64``), of which no index
    has any: some releases of packaging rank them first, some last."""
    kind = own_kind()
    if not kind or platform_of(kind) is None:
        pytest.skip("uv has no name for this kind of machine")
    mine = tags_of(kind, ".".join(map(str, sys.version_info[:3])))
    own = [tag for tag in sys_tags() if tag in mine and not tag.platform.startswith("linux_")]
    assert len(own) > 100
    assert sorted(own, key=mine.__getitem__) == own
