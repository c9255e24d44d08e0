"""State <-> bytes: what goes in comes out, and what is not potluck's is refused."""

from __future__ import annotations

import json
import pickle
import random
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from potluck.checkpoint.state import decode, encode, fingerprint
from potluck.errors import CheckpointError


def same(left: object, right: object) -> bool:
    """Equal in structure, type and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*raw)
    if isinstance(left, np.ndarray | np.generic):
        same_kind = left.dtype == right.dtype and left.shape == right.shape
        return same_kind and left.tobytes() == right.tobytes()
    return repr(left) == repr(right)


STATE = {
    "model": {
        "conv.weight": torch.randn(3, 2, 2),
        "half": torch.randn(5).half(),
        "brain": torch.randn(5).bfloat16(),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "transposed": torch.arange(6, dtype=torch.int8).reshape(2, 3).t(),
    },
    "optimizer": {"state": {0: {"step": 3}, 1: {}}, "param_groups": [{"betas": (0.9, 0.999)}]},
    "numpy": [np.arange(6, dtype=np.uint16).reshape(2, 3), np.float32(1.5), np.zeros((), bool)],
    "brain": np.ones(3, ml_dtypes.bfloat16),
    "odd": (float("nan"), float("-inf"), -0.0, 1e-320, 2**80, None, True, "", "ü\n"),
    None: {True: "yes", -3: "minus three"},
    "a": {"b/c": np.zeros(1), "b": {"c": np.ones(1)}},
    "__metadata__": np.zeros(2),
}


def test_a_nested_state_comes_back_bit_for_bit() -> None:
    assert same(decode(encode(STATE)), STATE)


@pytest.mark.parametrize("state", [None, 3, [], {}, (), np.zeros(3), torch.ones(2)])
def test_small_states_come_back_too(state: object) -> None:
    assert same(decode(encode(state)), state)


def test_the_same_state_gives_the_same_bytes_and_fingerprint() -> None:
    assert encode(STATE) == encode(decode(encode(STATE)))
    assert fingerprint(STATE) == fingerprint(decode(encode(STATE)))


def test_a_fingerprint_notices_one_bit_a_name_a_shape_and_a_dtype() -> None:
    base = np.arange(4.0)
    flipped = base.copy()
    flipped.view(np.uint8)[5] ^= 1
    others = [{"w": flipped}, {"v": base}, {"w": base.reshape(2, 2)}, {"w": base.view(np.int64)}]
    assert len({fingerprint(state) for state in [{"w": base}, *others]}) == 5


def test_big_endian_and_strided_arrays_are_stored_by_value() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[::2, ::-1]
    assert np.array_equal(decode(encode(array)), array)


def test_a_parameter_that_requires_grad_is_stored_as_its_value() -> None:
    loaded = decode(encode(torch.nn.Parameter(torch.ones(2))))
    assert not loaded.requires_grad
    assert loaded.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, {2, 3}]}, "a/1 is a set"),
        ({"f": print}, "f is a builtin_function_or_method"),
        (object(), "the state is a object"),
        ({"t": {(1, 2): 3}}, "t has a tuple as a key"),
        ({"s": np.array(["x"])}, "s is an array of dtype <U1"),
        ({"s": torch.eye(2).to_sparse()}, "s is a torch.sparse_coo tensor"),
    ],
)
def test_what_a_state_cannot_hold_is_named_with_its_path(state: object, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        encode(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(TypeError, match="nested more than 64 deep"):
        encode(state)


def test_pickle_is_refused_and_never_run() -> None:
    with pytest.raises(CheckpointError, match="not a potluck state"):
        decode(pickle.dumps({"a": 1}))


def test_a_header_that_announces_a_terabyte_is_refused() -> None:
    with pytest.raises(CheckpointError):
        decode(struct.pack("<Q", 1 << 40) + b"{}")


def with_tree(tree: str) -> bytes:
    """A valid safetensors buffer with one tensor, ``w``, and the given tree."""
    header = {
        "__metadata__": {"potluck.tree": tree},
        "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"\0\0\0\0"


def test_the_hand_made_buffer_is_valid_so_that_the_next_test_means_something() -> None:
    assert same(decode(with_tree('{"array": "w"}')), np.zeros(1, np.float32))


@pytest.mark.parametrize(
    "tree",
    [
        "",
        "[",
        "3",
        '{"array": "v"}',
        '{"array": ["w"]}',
        '{"list": [{"array": "w"}, {"array": "w"}]}',
        '{"eval": "w"}',
        '{"array": "w", "list": []}',
        '{"dict": [["a"]]}',
        '{"dict": [[["a"], {"array": "w"}]]}',
        '{"dict": [[0.5, {"array": "w"}]]}',
        '{"float": "1.0"}',
        "NaN",
        '{"list":[' * 100 + '{"array": "w"}' + "]}" * 100,
        "[" * 100_000,
    ],
)
def test_a_tree_that_potluck_never_writes_is_refused(tree: str) -> None:
    with pytest.raises(CheckpointError):
        decode(with_tree(tree))


def test_no_damage_does_more_than_raise_checkpoint_error() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    whole = encode({"w": np.arange(3.0), "n": [1, "two", None]})
    for _ in range(2000):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except CheckpointError:
            continue


@pytest.mark.beside_torch
def test_a_numpy_state_needs_no_torch() -> None:
    script = (
        "import sys, numpy as np\n"
        "from potluck.checkpoint.state import encode, decode\n"
        "assert decode(encode({'w': np.ones(2)}))['w'].sum() == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
