"""What ``potluck plan`` and the script that it measures have in common."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "POTLUCK_PLAN"
"""Set in the environment of workers whose script is only measured."""
FACT = "plan"
"""The fact under which rank 0 reports the measurements."""


def plan_file(script: str | os.PathLike[str]) -> Path:
    """Where the plan of ``script`` is kept: beside it, so that it travels with its folder."""
    return Path(script).with_suffix(".plan.json")
