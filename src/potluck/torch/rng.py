"""The state of every random generator a training may draw from, taken and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from potluck.checkpoint.state import State


def capture_random() -> State:
    """The states of torch's generators (CPU, and CUDA if in use), Python's and NumPy's global."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random(state: State) -> None:
    """Go on drawing where ``capture_random`` was called.

    CUDA generators of which this machine has another number are left alone.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    cuda = state.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
