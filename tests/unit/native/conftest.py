"""Every test of this folder that names ``kernel_set`` runs once per instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from potluck._core import native

SETS = native.core.kernel_sets() if native.available else []


@pytest.fixture(scope="module", params=SETS or [None])
def kernel_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of one instruction set, in use while the module's tests run."""
    if not native.available:
        pytest.skip(f"no native core: {native.reason}")
    before = native.core.kernel_set()
    native.core.use_kernel_set(request.param)
    yield request.param
    native.core.use_kernel_set(before)
