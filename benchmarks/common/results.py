"""Dated result files: ``DATE-NAME.json`` and the same as text beside it; never overwritten."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results"


def save(result: dict[str, Any], text: Sequence[str], folder: Path = FOLDER) -> Path:
    """Keep ``result`` and its table; the path of the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['machine']['date']}-{result['benchmark']}"
    number = 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.json").exists():
        number += 1
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".txt").write_text("\n".join(text) + "\n")
    return path


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--save``, for ``keep``."""
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=FOLDER,
        metavar="FOLDER",
        help="keep the figures, in benchmarks/results/ if no folder is named",
    )


def keep(folder: Path | None, result: dict[str, Any], text: Sequence[str]) -> None:
    """``save``, if ``--save`` was given, and say where."""
    if folder is not None:
        print(f"saved: {save(result, text, folder)}")
