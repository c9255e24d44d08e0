"""Secure aggregation: the sum is exact, and nothing else can be seen."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import FederationError
from potluck.federated import SecureAggregation
from potluck.federated.secure.client import MaskingClient
from potluck.federated.secure.masking import NUM_EXTRA, Scale, mask
from potluck.federated.secure.server import MaskingServer, Spoiled

SESSION = b"round 1"


class Run:
    """``num`` clients with random words, of which some are lost before each phase."""

    def __init__(self, num: int, threshold: int, length: int = 50, seed: int = 0) -> None:
        self.names = [str(number) for number in range(num)]
        self.clients = {name: MaskingClient(name, SESSION) for name in self.names}
        self.server = MaskingServer(threshold, SESSION)
        self.threshold = threshold
        words = np.random.default_rng(seed)
        self.words = {
            name: words.integers(0, 2**32, length, dtype=np.uint32) for name in self.names
        }

    def alive(self, *lost: str) -> list[str]:
        self.names = [name for name in self.names if name not in lost]
        return self.names

    def total(self, *lost: tuple[str, ...]) -> np.ndarray:
        before_keys, before_shares, before_masked, before_unmask = lost
        keys = {name: self.clients[name].keys() for name in self.alive(*before_keys)}
        self.server.take_keys(keys)
        sealed = {
            name: self.clients[name].shares(keys, self.threshold)
            for name in self.alive(*before_shares)
        }
        self.server.take_shares(sealed)
        masked = {
            name: self.clients[name].masked(self.server.shares_for(name), self.words[name])
            for name in self.alive(*before_masked)
        }
        self.server.take_masked(masked)
        survivors = list(masked)
        opened = {name: self.clients[name].unmask(survivors) for name in self.alive(*before_unmask)}
        return self.server.total(opened)

    def expected(self) -> np.ndarray:
        """The plain sum of those whose masked words arrived."""
        total = np.zeros(50, np.uint32)
        for name in self.server.masked:
            total += self.words[name]
        return total


def test_the_sum_is_exact() -> None:
    run = Run(5, 3)
    np.testing.assert_array_equal(run.total((), (), (), ()), run.expected())
    assert len(run.server.masked) == 5


@pytest.mark.parametrize("phase", range(4))
def test_the_sum_is_exact_with_as_many_drop_outs_as_it_bears_in_each_phase(phase: int) -> None:
    """Five clients, a threshold of t = 3: t - 1 of them are lost in one phase."""
    for lost in itertools.combinations("01234", 2):
        run = Run(5, 3, seed=phase)
        phases = [lost if number == phase else () for number in range(4)]
        np.testing.assert_array_equal(run.total(*phases), run.expected())
        assert len(run.server.masked) == (5 if phase == 3 else 3)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 9), st.randoms(use_true_random=False))
def test_the_sum_is_exact_for_any_losses_over_the_phases(num: int, chance: random.Random) -> None:
    threshold = num // 2 + 1
    lost = chance.sample([str(n) for n in range(num)], chance.randint(0, num - threshold))
    phases: list[list[str]] = [[], [], [], []]
    for name in lost:
        phases[chance.randrange(4)].append(name)
    # Before keys: the threshold must be above half of those that are left.
    run = Run(num, threshold)
    np.testing.assert_array_equal(run.total(*map(tuple, phases)), run.expected())


@pytest.mark.parametrize(
    ("phase", "did"), [(0, "sent keys"), (1, "sent shares"), (2, "sent their"), (3, "opened")]
)
def test_one_drop_out_too_many_ends_the_round_with_nothing_revealed(phase: int, did: str) -> None:
    phases = [("0", "1", "2") if number == phase else () for number in range(4)]
    with pytest.raises(FederationError, match=f"2 clients {did}.*, 3 are needed"):
        Run(5, 3).total(*phases)


def test_what_the_server_sees_is_uniform() -> None:
    """All clients send zeros. Chi-square over the 256 values of each byte of the masked words: for
    uniform bytes it has mean 255 and standard deviation 22.6."""
    length = 1 << 16
    seeds = [bytes([number]) * 32 for number in range(3)]
    for seed in seeds:  # the fixed part: the masks of known seeds
        assert abs(chi_square(mask(seed, length)) - 255) < 5 * 22.6
    run = Run(4, 3)
    run.words = dict.fromkeys(run.names, np.zeros(length, np.uint32))
    run.total((), (), (), ())
    seen = list(run.server.masked.values())
    for words in seen:
        assert abs(chi_square(words) - 255) < 7 * 22.6
    for one, other in itertools.combinations(seen, 2):  # nor do two of them tell of each other
        assert abs(chi_square(one - other) - 255) < 7 * 22.6
        assert abs(chi_square(one + other) - 255) < 7 * 22.6


def chi_square(words: np.ndarray) -> float:
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_client_never_opens_both_masks_of_another_and_answers_once() -> None:
    run = Run(4, 3)
    run.total((), (), ("3",), ())
    client = MaskingClient("0", SESSION)
    with pytest.raises(ValueError, match="step 4 of secure aggregation after step 0"):
        client.unmask(["0"])
    with pytest.raises(ValueError, match="step 4 of secure aggregation after step 4"):
        run.clients["0"].unmask(["0", "1", "3"])
    second = Run(4, 3)
    keys = {name: second.clients[name].keys() for name in second.names}
    second.server.take_keys(keys)
    second.server.take_shares({n: second.clients[n].shares(keys, 3) for n in second.names})
    zero = second.clients["0"]
    zero.masked(second.server.shares_for("0"), second.words["0"])
    answer = zero.unmask(["0", "1", "2"])
    assert answer["seeds"].keys() == {"0", "1", "2"}
    assert answer["keys"].keys() == {"3"}


def test_a_threshold_that_two_halves_could_reach_is_refused() -> None:
    client = MaskingClient("0", SESSION)
    keys = {"0": client.keys()} | {str(n): MaskingClient(str(n), SESSION).keys() for n in (1, 2, 3)}
    with pytest.raises(ValueError, match="it must be above half of them"):
        client.shares(keys, 2)


@pytest.mark.parametrize("num", range(4, 30))
def test_more_than_half_of_the_clients_are_needed_for_any_threshold(num: int) -> None:
    """With half of them no client would take part, as the other half could open its mask."""
    just_above_half = SecureAggregation(threshold=math.nextafter(0.5, 1))
    assert just_above_half.shares_needed(num) == max(3, num // 2 + 1)


def test_two_clients_are_refused_since_each_could_tell_the_others_change() -> None:
    clients = {name: MaskingClient(name, SESSION) for name in "ab"}
    keys = {name: each.keys() for name, each in clients.items()}
    with pytest.raises(ValueError, match=r"a threshold of 2 for 2 clients.*and at least 3"):
        clients["a"].shares(keys, 2)
    assert SecureAggregation().shares_needed(2) == 3


def test_a_server_that_changes_keys_or_shares_is_noticed() -> None:
    clients = {name: MaskingClient(name, SESSION) for name in "abc"}
    keys = {name: each.keys() for name, each in clients.items()}
    with pytest.raises(ValueError, match="does not have this client's"):
        clients["a"].shares({**keys, "a": keys["b"]}, 3)
    clients = {name: MaskingClient(name, SESSION) for name in "abc"}
    keys = {name: each.keys() for name, each in clients.items()}
    sealed = {name: each.shares(keys, 3) for name, each in clients.items()}
    broken = bytearray(sealed["b"]["a"])
    broken[20] ^= 1
    mine = {source: sealed[source]["a"] for source in "abc"} | {"b": bytes(broken)}
    clients["a"].masked(mine, np.zeros(4, np.uint32))
    with pytest.raises(ValueError, match="the share of client b was changed on its way"):
        clients["a"].unmask(["a", "b", "c"])


# Numbers.


def test_the_mean_comes_back_weighted_and_saturation_is_counted() -> None:
    chance = np.random.default_rng(5)
    scale = Scale(limit=1.0, max_samples=100, num_clients=10)
    values = [chance.uniform(-0.9, 0.9, 1000) for _ in range(10)]
    weights = [int(each) for each in chance.integers(1, 100, 10)]
    total = np.zeros(1000 + NUM_EXTRA, np.uint32)
    for vector, weight in zip(values, weights, strict=True):
        total += scale.encode(vector, weight, chance)
    mean, samples, num_high, num_cut, num_heavy = scale.decode(total, 10)
    expected = np.average(values, axis=0, weights=weights)
    assert np.abs(mean - expected).max() < 1e-7
    assert abs(samples - sum(weights)) < 1e-3
    assert num_high == sum(int((np.abs(vector) > 0.25).sum()) for vector in values)
    assert (num_cut, num_heavy[0]) == (0, 0)
    over = np.zeros(1000 + NUM_EXTRA, np.uint32)
    for vector in values:
        over += scale.encode(vector * 2, 500, chance)
    mean, _, num_high, num_cut, num_heavy = scale.decode(over, 10)
    assert num_high == sum(int((np.abs(2 * v) > 0.25).sum()) for v in values)
    assert num_cut == sum(int((np.abs(2 * v) > 1).sum()) for v in values)
    assert num_heavy == (10, 0, 0, 0, 0, 0, 0, 0)
    assert np.abs(mean).max() <= 1.0


def test_extreme_values_do_not_wrap_around() -> None:
    scale = Scale(limit=1.0, max_samples=1, num_clients=3)
    chance = np.random.default_rng(0)
    total = np.zeros(1 + NUM_EXTRA, np.uint32)
    for _ in range(3):
        total += scale.encode(np.array([1e30]), 1, chance)
    mean, _, _, num_cut, _ = scale.decode(total, 3)
    assert (mean[0], num_cut) == (1.0, 3)


def test_no_weight_is_an_error() -> None:
    scale = Scale(limit=1.0, max_samples=1e30, num_clients=3)
    words = scale.encode(np.zeros(1), 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="max_samples is far too large"):
        scale.decode(words, 1)


def test_a_client_with_shares_of_another_key_than_its_own_is_named() -> None:
    """It leaves before its masked words, so that the others' shares of its key are needed."""
    run = Run(5, 3)
    keys = {name: run.clients[name].keys() for name in run.names}
    told = {**keys, "0": {**keys["0"], "mask": MaskingClient("0", SESSION).keys()["mask"]}}
    run.server.take_keys(told)
    run.server.take_shares(
        {n: run.clients[n].shares(keys if n == "0" else told, 3) for n in run.names}
    )
    rest = run.names[1:]
    run.server.take_masked(
        {n: run.clients[n].masked(run.server.shares_for(n), run.words[n]) for n in rest}
    )
    opened = {n: run.server.checked(n, run.clients[n].unmask(rest)) for n in rest}
    with pytest.raises(Spoiled, match="client 0 made shares of another key than its own"):
        run.server.total(opened)


@pytest.mark.parametrize(("num_accusers", "error"), [(2, FederationError), (3, Spoiled)])
def test_only_more_accusers_than_may_be_dishonest_make_a_client_guilty(
    num_accusers: int, error: type[Exception]
) -> None:
    run = Run(5, 3)
    keys = {name: run.clients[name].keys() for name in run.names}
    run.server.take_keys(keys)
    run.server.take_shares({name: run.clients[name].shares(keys, 3) for name in run.names})
    for name in run.names[-num_accusers:]:
        with pytest.raises(ValueError, match="it can't read the shares that client 0 has made"):
            run.server.checked(name, {"unread": ["0"]})
    with pytest.raises((FederationError, Spoiled)) as caught:
        run.server.total({})
    assert isinstance(caught.value, error)


def test_values_above_all_weights_are_no_sum() -> None:
    scale, random = Scale(1.0, 10.0, 4), np.random.default_rng(0)
    words = scale.encode(np.full(6, 0.1), 1, random)
    scale.decode(words, 1)
    words[2] = scale.levels  # more than a client of this weight can send
    with pytest.raises(ValueError, match="this is no sum of clients' changes"):
        scale.decode(words, 1)
