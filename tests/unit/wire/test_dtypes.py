from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from potluck._core.wire.dtypes import NAMES, code_of, dtype_of


def test_every_dtype_has_its_own_code_and_comes_back() -> None:
    codes = set()
    for name in NAMES:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        code = code_of(dtype)
        assert 0 < code < 256
        assert dtype_of(code) == dtype
        codes.add(code)
    assert len(codes) == len(NAMES)


def test_codes_that_mean_nothing() -> None:
    assert dtype_of(0) is None
    assert dtype_of(255) is None


@pytest.mark.parametrize("dtype", ["U3", "O", "V8", "M8[s]", "g", "i4,i4"])
def test_other_dtypes_are_refused_with_the_list_of_those_that_are_not(dtype: str) -> None:
    with pytest.raises(TypeError, match="can't be communicated; supported: float16, bfloat16"):
        code_of(np.dtype(dtype))
