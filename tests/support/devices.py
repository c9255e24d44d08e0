"""The device of the tests in tests/gpu: the CUDA GPU, or what POTLUCK_TEST_DEVICE names.

With ``POTLUCK_TEST_DEVICE=cpu`` those that need no GPU run where there is none, so that their logic
is known to be right before they get a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("POTLUCK_TEST_DEVICE", "cuda")
DEVICES = (DEVICE, "cpu", "cpu")
"""Of ranks that are threads: torch computes all backwards of a GPU in one thread of a process, in
which ranks that share it would wait for each other."""

needs_device = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"
)
