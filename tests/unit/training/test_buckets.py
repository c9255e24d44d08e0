"""Bucket assignment: complete, within the limit, in the order gradients appear."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.training.buckets import Slot, assign


def test_the_last_registered_parameters_go_first_and_the_first_bucket_is_small() -> None:
    slots = [Slot(10, 4, "cpu")] * 6
    buckets = assign(slots, bucket_bytes=80, first_bucket_bytes=40)
    assert [bucket.parameters for bucket in buckets] == [(5,), (4, 3), (2, 1), (0,)]
    assert buckets[1].offsets == (0, 10)
    assert (buckets[1].numel, buckets[1].length) == (20, 22)


def test_dtypes_do_not_mix() -> None:
    slots = [Slot(4, 4, "a"), Slot(4, 2, "b"), Slot(4, 4, "a"), Slot(4, 2, "b")]
    buckets = assign(slots, bucket_bytes=1000, first_bucket_bytes=1000)
    assert [bucket.parameters for bucket in buckets] == [(3, 1), (2, 0)]


def test_a_parameter_larger_than_a_bucket_has_its_own() -> None:
    slots = [Slot(1, 4, 0), Slot(1000, 4, 0), Slot(1, 4, 0)]
    buckets = assign(slots, bucket_bytes=100, first_bucket_bytes=100)
    assert [bucket.parameters for bucket in buckets] == [(2,), (1,), (0,)]


def test_no_parameters_make_no_buckets() -> None:
    assert assign([], bucket_bytes=1, first_bucket_bytes=1) == ()


@settings(deadline=None)
@given(
    slots=st.lists(
        st.builds(
            lambda numel, size, device: Slot(numel, size, (device, size)),
            st.integers(0, 50),
            st.sampled_from([2, 4, 8]),
            st.sampled_from("ab"),
        )
    ),
    limit=st.integers(1, 300),
    first=st.integers(1, 300),
)
def test_every_parameter_is_in_one_bucket_and_none_is_too_full(
    slots: list[Slot], limit: int, first: int
) -> None:
    buckets = assign(slots, bucket_bytes=limit, first_bucket_bytes=min(first, limit))
    members = [index for bucket in buckets for index in bucket.parameters]
    assert sorted(members) == list(range(len(slots)))
    for bucket in buckets:
        parts = [slots[index] for index in bucket.parameters]
        assert len({part.key for part in parts}) == 1
        assert bucket.numel == sum(part.numel for part in parts)
        assert len(parts) == 1 or bucket.numel * parts[0].element_bytes <= limit
    assert [min(b.parameters) for b in buckets] == sorted(
        (min(b.parameters) for b in buckets), reverse=True
    )
