from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from potluck._core.context.arrays import adapt, empty_like


def test_contiguous_memory_is_used_as_it_is() -> None:
    for user in (np.zeros((3, 4)), np.zeros(0), np.array(5.0), np.zeros(3, ml_dtypes.bfloat16)):
        adapted = adapt(user)
        assert adapted.array is user or np.shares_memory(adapted.array, user)
        assert adapted.array.shape == user.shape
        assert adapted.write_back() is user


@pytest.mark.parametrize("view", [np.s_[:, ::2], np.s_[::-1], np.s_[1:, 1], np.s_[::2, ::-1]])
def test_other_layouts_are_copied_and_written_back(view: object) -> None:
    base = np.arange(24.0).reshape(4, 6)
    user = base[view]  # type: ignore[call-overload]
    adapted = adapt(user)
    assert adapted.array.flags.c_contiguous
    np.testing.assert_array_equal(adapted.array, user)
    adapted.array += 100
    assert base.max() < 100
    assert adapted.write_back() is user
    np.testing.assert_array_equal(user, adapted.array)
    assert (base >= 100).sum() == user.size


def test_fortran_order_keeps_its_meaning() -> None:
    user = np.asfortranarray(np.arange(6).reshape(2, 3))
    adapted = adapt(user)
    adapted.array[0, 1] = 99
    adapted.write_back()
    assert user.tolist() == [[0, 99, 2], [3, 4, 5]]


def test_read_only_memory_may_be_sent_but_not_received_into() -> None:
    user = np.zeros(3)
    user.flags.writeable = False
    assert adapt(user, writable=False).array is user
    with pytest.raises(ValueError, match="read-only, and the result would go into it; pass a copy"):
        adapt(user)


def test_foreign_byte_order_is_refused() -> None:
    user = np.zeros(3, dtype=np.dtype("f4").newbyteorder())
    with pytest.raises(TypeError, match="foreign byte order"):
        adapt(user)


@pytest.mark.parametrize("user", [[1.0], (1, 2), 3.0, "abc", None, memoryview(b"abc")])
def test_what_is_no_array_is_refused_with_advice(user: object) -> None:
    with pytest.raises(TypeError, match=f"got {type(user).__name__}; wrap it with numpy.asarray"):
        adapt(user)


@pytest.mark.parametrize("dtype", ["O", "U4", "M8[s]", "V3"])
def test_dtypes_that_can_not_travel(dtype: str) -> None:
    with pytest.raises(TypeError, match="can't be communicated"):
        adapt(np.zeros(2, dtype=dtype))


def test_subclasses_are_taken_for_what_they_hold() -> None:
    matrix = np.zeros((2, 3)).view(np.matrix)
    adapted = adapt(matrix)
    assert type(adapted.array) is np.ndarray
    assert adapted.array.reshape(-1).shape == (6,)
    adapted.array[:] = 5
    assert adapted.write_back() is matrix
    assert (np.asarray(matrix) == 5).all()


def test_masked_arrays_are_refused() -> None:
    """Their mask would be ignored."""
    with pytest.raises(TypeError, match="masked"):
        adapt(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


def test_new_arrays_are_of_the_same_kind() -> None:
    made = empty_like(np.zeros(3, dtype=np.int8), (2, 3))
    assert (made.shape, made.dtype) == ((2, 3), np.int8)


# ---------------------------------------------------------------- torch

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_share_their_memory(dtype: object, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    adapted = adapt(tensor)
    assert adapted.array.shape == shape
    if tensor.numel():
        assert adapted.array.__array_interface__["data"][0] == tensor.data_ptr()
        adapted.array[...] = 2
        assert (tensor == 2).all()
    assert adapted.write_back() is tensor


def test_bfloat16_means_the_same_on_both_sides() -> None:
    tensor = torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16)
    array = adapt(tensor).array
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype(float).tolist() == tensor.double().tolist()


def test_strided_tensors_are_written_back() -> None:
    tensor = torch.zeros(4, 4)
    adapted = adapt(tensor[:, 1])
    adapted.array[:] = 7
    assert (tensor == 0).all()
    adapted.write_back()
    assert (tensor[:, 1] == 7).all()
    assert (tensor[:, 0] == 0).all()


def test_parameters_that_need_gradients_are_changed_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    adapt(parameter).array[:] = 4
    assert (parameter == 4).all()
    assert parameter.requires_grad


def test_tensors_that_can_not_travel() -> None:
    with pytest.raises(TypeError, match="to_dense"):
        adapt(torch.zeros(3, 3).to_sparse())
    with pytest.raises(TypeError):
        adapt(torch.zeros(3, dtype=torch.float8_e4m3fn))


def test_new_tensors_are_of_the_same_kind() -> None:
    made = empty_like(torch.zeros(3, dtype=torch.int8, requires_grad=False), (2, 3))
    assert (tuple(made.shape), made.dtype) == ((2, 3), torch.int8)
