"""The imports of a script, read from its text (nothing is run), and the packages that they need.

Included are ``import`` statements of the script and of the modules of its project that it imports,
at any depth. Not included are names that are made while the script runs
(``importlib.import_module``) and what installed packages import; torch's optional packages are
looked up. An import counts as optional below ``try:`` with a handler for its failure, and below
``if TYPE_CHECKING:``."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from potluck._core.wire.jobs import MAX_NEEDS, Need

_FAILURES = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_MAX_FILES = 2000
_MAX_BYTES = 4 << 20


def imported(files: Sequence[Path], places: Sequence[Path]) -> frozenset[str]:
    """The top-level names that ``files``, Python files of a project, import, without the modules of
    the project, of Python and of potluck. ``places`` are the folders in which the project's own
    modules are looked for, that of a script among them."""
    waiting, seen, names = list(files), set[Path](), set[str]()
    while waiting and len(seen) < _MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for level, module in _imports(path):
            roots = [path.parents[level - 1]] if level else places
            own = [each for root in roots for each in _files(root, module.split("."))]
            waiting += own
            top = module.partition(".")[0]
            if module == "potluck.torch" or module.startswith("potluck.torch."):
                names.add("torch")
            elif top and not (level or own or top in sys.stdlib_module_names or top == "potluck"):
                names.add(top)
    return frozenset(names)


def project_root(script: Path, own: Path) -> Path:
    """The folder that travels with ``script``, which finds modules in the folder ``own`` first:
    that one, or, if it imports modules of its git repository that are not in there, the
    repository's."""
    root = repository_of(own)
    if root == own:
        return own
    names = imported([script], [own])
    places = importable_from(root)
    return root if any(_files(place, [name]) for name in names for place in places) else own


def repository_of(folder: Path) -> Path:
    """The root of the git repository that ``folder`` is in; ``folder`` if it is in none."""
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def module_file(name: str, places: Sequence[Path]) -> tuple[Path, Path] | None:
    """The file that ``python -m name`` runs, and the first of ``places`` that has it: of a package
    its ``__main__.py``, which goes before a module of that name, if there is an ``__init__.py``."""
    for place in places:
        package = place.joinpath(*name.split("."))
        module, main = package.with_name(f"{package.name}.py"), package / "__main__.py"
        is_first = (package / "__init__.py").is_file()
        for file in (main, module) if is_first else (module, main):
            if file.is_file():
                return file, place
    return None


def importable_from(root: Path) -> list[Path]:
    """The folders of a project whose modules its scripts can import."""
    return [root, *([root / "src"] if (root / "src").is_dir() else [])]


def needs_of(names: Collection[str]) -> tuple[Need, ...]:
    """The packages that bring these modules here. A name that is not installed here is none: the
    script does without it, or fails on every machine."""
    if not names:
        return ()
    distributions = importlib.metadata.packages_distributions()
    found = (
        Need(name[:256], next(iter(distributions.get(name, ())), name)[:256])
        for name in sorted(names)
        if _is_installed(name)
    )
    return tuple(found)[:MAX_NEEDS]


def own_modules(names: Collection[str], places: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Those of the ``names`` that are the user's own, with their folders: outside of the project,
    installed from there (``pip install -e``) or just lying there."""
    found = ((name[:256], _own_place(name, places)[:4096]) for name in sorted(names))
    return tuple(each for each in found if each[1])[:MAX_NEEDS]


def wants_torch(needs: Sequence[Need]) -> bool:
    """Whether one of ``needs`` is torch, or an installed package that needs torch."""
    seen: set[str] = set()
    waiting = [need.package for need in needs]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name == "torch":
            return True
        if name in seen:
            continue
        seen.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for text in importlib.metadata.requires(name) or ():
                if "extra ==" not in text:
                    waiting.append(re.split(r"[^\w.-]", text, maxsplit=1)[0])
    return False


def lacking(needs: Sequence[Need]) -> tuple[Need, ...]:
    """Those of ``needs`` that this machine's Python does not have."""
    importlib.invalidate_caches()
    return tuple(need for need in needs if not _is_installed(need.module))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """The imports of a file: how many folders up it is relative to (0: none), and the module.
    Nothing for a file that is no Python, on which the script's own run fails."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.level, module
            for alias in node.names:  # which may be modules, too
                yield node.level, f"{module}.{alias.name}".lstrip(".")
        elif isinstance(node, ast.Try) and any(map(_takes_failures, node.handlers)):
            waiting += [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _takes_failures(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    named = {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
    return bool(named & _FAILURES)


def _files(root: Path, names: Sequence[str]) -> list[Path]:
    """The files below ``root`` that the import of a dotted name runs. Not empty for a folder of
    modules without ``__init__.py``."""
    found, place = list[Path](), root
    for name in names:
        if not name.isidentifier():
            break
        if (place / f"{name}.py").is_file():
            return [*found, place / f"{name}.py"]
        place = place / name
        if not place.is_dir():
            break
        found.append(place / "__init__.py")
    return found


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _own_place(name: str, places: Sequence[Path]) -> str:
    """The folder of the user's own in which the module ``name`` is, outside of the project; empty
    if there is none. It may be installed from there (``pip install -e``), or just lie there."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
        origins = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        for origin in filter(None, origins):
            path = Path(origin)
            folder = path.parent.parent if path.name == "__init__.py" else path.parent
            if path.exists() and not _is_for_packages(folder):
                return str(folder)
    for place in places:
        for above in (place, *list(place.parents)[:3]):
            if (above / f"{name}.py").is_file() or any((above / name).glob("*.py")):
                return str(above)
    return ""


def _is_for_packages(folder: Path) -> bool:
    """Whether packages are installed into ``folder``, or it is Python's own."""
    own = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    return any(folder.is_relative_to(each) for each in own) or any(folder.glob("*.dist-info"))


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
