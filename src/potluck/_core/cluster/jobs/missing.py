"""Sentences about packages that a script needs and a machine lacks, with what to do there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from potluck._core.wire.jobs import Need

_PIP_NAMES = {"sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml"}


def describe_lack(needs: Sequence[Need], own: Sequence[tuple[str, str]], python: str) -> str:
    """What follows the name of a machine whose ``python`` lacks ``needs``; ``own`` as in
    ``JobSpec``."""
    folders = dict(own)
    texts = [_own(need.module, folders[need.module]) for need in needs if need.module in folders]
    packages = [need.package for need in needs if need.module not in folders]
    if packages:
        names = " ".join(packages)
        texts.append(f"{', '.join(packages)}; there: {python} -m pip install {names}")
    return f"lacks {'; '.join(texts)}"


def describe_missing(
    module: str, needs: Sequence[Need], own: Sequence[tuple[str, str]], machine: str, python: str
) -> str:
    """Why an import of ``module`` failed on ``machine`` (empty: this one), whose Python is
    ``python`` (empty: not known). A module of the user's own is no package on PyPI."""
    folders = dict(own)
    if module in folders:
        return f"the script needs {_own(module, folders[module])}"
    packages = {need.module: need.package for need in needs}
    package = packages.get(module) or _PIP_NAMES.get(module, module)
    pip = f"{python or 'python'} -m pip install {package}"
    where = f"for {python}: {pip}"
    if machine:
        where = f"on {machine} ({python or 'its Python is not known here'}); there: {pip}"
    return f"the script needs the Python package {module!r}, which is not installed {where}"


def _own(module: str, folder: str) -> str:
    return (
        f"{module!r}, which lies in {folder}, beside the script's folder, and did not travel: "
        f"potluck run --root {folder} sends both"
    )
