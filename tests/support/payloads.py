"""Values that a payload may hold, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

KEYS = st.none() | st.text(max_size=3) | st.integers(2, 2**63)


def scalars(*, max_size: int) -> SearchStrategy[Any]:
    """Numbers, texts and bytes; the last two of up to ``max_size``."""
    return (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=max_size)
        | st.binary(max_size=max_size)
    )


def nested(leaves: SearchStrategy[Any], *, max_size: int, max_leaves: int) -> SearchStrategy[Any]:
    """Lists, tuples and dicts of up to ``max_size`` values, nested, over ``leaves``."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=max_size)
            | st.lists(inner, max_size=max_size).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=max_size)
        ),
        max_leaves=max_leaves,
    )
