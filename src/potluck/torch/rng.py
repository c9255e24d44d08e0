"""The states of the random generators: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from potluck.checkpoint.state import State


def capture_random() -> dict[str, Any]:
    """The states of torch's generators (CPU, and CUDA if in use) and of the global generators of
    Python and NumPy."""
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
    """Set the generators to ``state``, a result of ``capture_random``.

    CUDA generators stay as they are if this machine has another number of devices.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    cuda = state.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
