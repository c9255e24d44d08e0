"""The digits example: short, and clear about what it lacks."""

from __future__ import annotations

import gzip
import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from support.examples import EXAMPLES, example

if importlib.util.find_spec("sklearn") is None:  # it isn't imported: that takes a second
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)

EXAMPLE = EXAMPLES / "digits.py"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return example("digits")


def test_the_example_is_short_and_mentions_potluck_rarely() -> None:
    lines = EXAMPLE.read_text().splitlines()
    code = [line for line in lines[9:] if re.search(r"\bpotluck\b|\bjob\.step\b", line)]
    assert len(lines) < 120
    assert [line.split("(")[0].strip() for line in code] == [
        "import potluck.torch",
        "model = potluck.torch.DistributedDataParallel",
        "job = potluck.torch.ElasticLoop",
        "with job.step",
    ]


def test_help_explains_the_options(digits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        digits.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for word in ("--data", "mnist:DIR", "--epochs", "--dtype", "--seed", "--checkpoint"):
        assert word in told


def test_too_low_an_accuracy_is_an_exit_code(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DistributedContext(LocalBackend()) as ctx:
        monkeypatch.setattr("potluck.torch.ddp.init", lambda: ctx)
        with pytest.raises(SystemExit, match=r"below 1\.1"):
            digits.main(["--epochs", "1", "--require-accuracy", "1.1"])


@pytest.mark.parametrize(
    ("module", "package"), [("torch", "torch"), ("sklearn.datasets", "scikit-learn")]
)
def test_a_missing_package_is_one_sentence_with_the_pip_command(module: str, package: str) -> None:
    script = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path({str(EXAMPLE)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"digits.py needs the Python package {package}: pip install {package}"
    ]


def write_idx(path: Path, values: torch.Tensor, *, packed: bool) -> None:
    data = struct.pack(f">3sB{values.dim()}I", b"\0\0\x08", values.dim(), *values.shape)
    data += values.to(torch.uint8).numpy().tobytes()
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A tiny data set in MNIST's format, one half packed."""
    generator = torch.Generator().manual_seed(0)
    for part, size in (("train", 20), ("t10k", 10)):
        images = torch.randint(0, 256, (size, 28, 28), generator=generator)
        packed = part == "train"
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", images, packed=packed)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", torch.arange(size) % 10, packed=packed)
    return tmp_path


def test_mnist_files_are_read_packed_or_not(digits: ModuleType, mnist: Path) -> None:
    x, y, test_x, test_y = digits.mnist(mnist)
    assert (x.shape, test_x.shape) == ((20, 1, 28, 28), (10, 1, 28, 28))
    assert (y.tolist(), test_y.tolist()) == ([*range(10), *range(10)], list(range(10)))
    assert 0 <= x.min() < x.max() <= 1


def test_the_example_trains_on_mnist_files(digits: ModuleType, mnist: Path) -> None:
    job = digits.main(
        [
            "--data",
            f"mnist:{mnist}",
            "--epochs",
            "2",
            "--batch-size",
            "6",
            "--require-accuracy",
            "0",
        ]
    )
    job.ctx.close()
    assert job.step_number == 8


def test_a_missing_mnist_file_is_named_with_what_to_do(digits: ModuleType, mnist: Path) -> None:
    (mnist / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SystemExit, match=r"t10k-labels-idx1-ubyte \(or .*gz\) is missing: put"):
        digits.main(["--data", f"mnist:{mnist}"])


@pytest.mark.parametrize("data", ["mnist", "fashion", "mnist/", ""])
def test_other_data_are_an_error(digits: ModuleType, data: str) -> None:
    with pytest.raises(SystemExit, match="--data is digits, or mnist:DIR with MNIST's four files"):
        digits.main(["--data", data])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:3],
        lambda data: data[:-1],
        lambda data: b"\x80\x04" + data,
        lambda data: data[:2] + b"\x0d" + data[3:],
        lambda data: data[:3] + b"\xff" + data[4:],
    ],
)
def test_a_damaged_mnist_file_is_named(digits: ModuleType, mnist: Path, damage: object) -> None:
    path = mnist / "t10k-images-idx3-ubyte"
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match="t10k-images-idx3-ubyte is no whole IDX file"):
        digits.read_idx(path)
