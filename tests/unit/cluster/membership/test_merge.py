"""Which of two clusters gives way: all pairs of small ones."""

from __future__ import annotations

from itertools import product

from potluck._core.cluster.membership.merge import ObservedCluster

HISTORIES = [("origin", ""), ("fork", "origin"), ("other fork", "origin"), ("stranger", "")]


def clusters(prefix: str) -> list[ObservedCluster]:
    """All clusters of up to three nodes, with and without jobs."""
    return [
        ObservedCluster(history, fork_of, busy, size, tuple(f"{prefix}{i}" for i in range(size)))
        for (history, fork_of), busy, size in product(HISTORIES, (False, True), (1, 2, 3))
    ]


PAIRS = [
    (one, other, (is_fresh, other_is_fresh), (known, other_known))
    for one in clusters("a")
    for other in clusters("b")
    if one.history != other.history
    for is_fresh, other_is_fresh in product((False, True), repeat=2)
    for known, other_known in product((False, True), repeat=2)
]


def gives_way(one: ObservedCluster, other: ObservedCluster, is_fresh: bool, known: bool) -> bool:
    """``known``: a node of the other cluster was a member of the history that this one forked."""
    return one.gives_way_to(other, other.nodes[:1] if known else (), is_fresh=is_fresh)


def test_two_clusters_never_give_way_to_each_other() -> None:
    """Else both would be gone, with their jobs."""
    both = [
        (one, other)
        for one, other, fresh, known in PAIRS
        if gives_way(one, other, fresh[0], known[0]) and gives_way(other, one, fresh[1], known[1])
    ]
    assert both == []


def test_of_two_sides_of_one_history_one_gives_way_to_the_other() -> None:
    """Also if both have jobs, and are of one size."""
    stay_apart = [
        (one, other)
        for one, other, fresh, known in PAIRS
        if one.origin == other.origin and one.busy == other.busy
        if not gives_way(one, other, fresh[0], known[0])
        if not gives_way(other, one, fresh[1], known[1])
    ]
    assert stay_apart == []


def test_strangers_of_one_size_with_jobs_stay_apart() -> None:
    """Joining would end the jobs of one of them."""
    one = ObservedCluster("one", "", True, 1, ("a",))
    other = ObservedCluster("other", "", True, 1, ("b",))
    assert not one.gives_way_to(other, (), is_fresh=True)
    assert not other.gives_way_to(one, (), is_fresh=True)


def test_no_history_gives_way_to_a_fork_of_it_that_is_no_larger() -> None:
    """One node that claims to be a fork with a job, as a liar may."""
    for one in clusters("a"):
        claim = ObservedCluster("claim", one.history, True, 1, ("liar",))
        assert not one.gives_way_to(claim, (), is_fresh=True)
