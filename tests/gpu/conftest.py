"""CUDA keeps descriptors for as long as a process lives: they are no leaks of a test."""

from __future__ import annotations

import threading

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda_has_begun() -> None:
    """Everything that the first use of a GPU opens is there before a test's own things are
    counted."""
    if not torch.cuda.is_available():
        return

    def use() -> None:
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        torch.ones(8).pin_memory().cuda(non_blocking=True)
        torch.cuda.synchronize()

    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
