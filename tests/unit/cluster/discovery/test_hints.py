"""Which addresses are called, in spite of what is forged."""

from __future__ import annotations

import itertools
import random

import pytest

from potluck._core.cluster.discovery.advert import WINDOW_S, Hint
from potluck._core.cluster.discovery.finder import Presence
from potluck._core.cluster.discovery.hints import MAX_HINTS, HintBook


def hint(host: str, instance: str = "", port: int = 1) -> Hint:
    return Hint(host, port, "beacon", instance)


def old(host: str, instance: str) -> Hint:
    """The hint of an advert of another time."""
    return Hint(host, 1, "beacon", instance, is_current=False)


def reach(book: HintBook, each: Hint, node: str, now: float) -> None:
    book.heard(each, now)
    book.calling(each)
    book.reached(each, node, now)
    book.linked(node)


def hosts(book: HintBook, now: float) -> list[str]:
    return [each.host for each in book.due(now)]


def test_a_new_address_is_called_at_once_and_then_more_and_more_seldom() -> None:
    book = HintBook()
    book.heard(hint("a"), 0.0)
    calls, now = [], 0.0
    while now < 30:
        book.heard(hint("a"), now)
        for each in book.due(now):
            book.calling(each)
            assert book.due(now) == [], "one call at a time"
            book.failed(each, now)
            calls.append(now)
        now += 0.25
    pauses = [after - before for before, after in itertools.pairwise(calls)]
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert max(pauses) == 5.0


def test_a_linked_node_is_not_called_wherever_it_was_seen_until_its_link_ends() -> None:
    book = HintBook()
    for host in ("wifi", "cable"):
        book.heard(hint(host, "x"), 0.0)
        for each in book.due(0.0):
            book.calling(each)
            book.reached(each, "node", 0.0)
    book.linked("node")
    assert hosts(book, 100.0) == []
    assert book.next_due(100.0) is None
    book.unlinked("node", 200.0)
    assert sorted(hosts(book, 200.0)) == ["cable", "wifi"]
    assert [each.host for each in book.places_of("node")] == ["wifi", "cable"]


def test_stale_adverts_of_an_address_lead_to_no_calls() -> None:
    book = HintBook()
    book.heard(hint("a", "killed"), 0.0)
    book.heard(hint("a", "alive"), 1.0)
    for each in book.due(1.0):
        book.calling(each)
        book.reached(each, "node", 1.0)
    book.linked("node")
    for number in range(10):
        book.heard(hint("a", ("killed", "alive")[number % 2]), 2.0 + number)
        assert hosts(book, 2.0 + number) == []
    book.unlinked("node", 20.0)
    assert hosts(book, 20.0) == ["a"]


def test_where_a_peer_was_lately_or_is_heard_again_is_called_every_second() -> None:
    book = HintBook()

    def calls_until(end: float, now: float, *, is_heard: bool) -> list[float]:
        calls = []
        while now < end:
            if is_heard:
                book.heard(hint("a"), now)
            for each in book.due(now):
                book.calling(each)
                book.failed(each, now)
                calls.append(now)
            now += 0.25
        return calls

    book.heard(hint("a"), 0.0)
    book.calling(hint("a"))
    book.reached(hint("a"), "node", 0.0)
    book.linked("node")
    book.unlinked("node", 10.0)
    lately = calls_until(60.0, 10.0, is_heard=False)
    assert max(after - before for before, after in itertools.pairwise(lately)) == 1.0
    for_long = calls_until(200.0, 100.0, is_heard=False)
    assert for_long[-1] - for_long[-2] == 5.0
    again = calls_until(230.0, 200.0, is_heard=True)
    assert max(after - before for before, after in itertools.pairwise(again)) == 1.0


def test_where_a_peer_was_comes_before_what_was_never_tried() -> None:
    book = HintBook()
    book.heard(hint("old"), 0.0)
    book.calling(hint("old"))
    book.reached(hint("old"), "node", 0.0)
    book.heard(hint("new"), 1.0)
    assert hosts(book, 1.0) == ["old", "new"]


def test_the_book_is_bounded_and_keeps_what_has_proved_itself(seed: int) -> None:
    rng = random.Random(seed)
    book = HintBook()
    book.heard(hint("friend", "f"), 0.0)
    book.calling(hint("friend"))
    book.reached(hint("friend"), "node", 0.0)
    book.linked("node")
    for number in range(10_000):
        now = number / 1000
        book.heard(hint(f"forged-{number}", f"{number:x}"), now)
        for each in book.due(now)[:2]:
            book.calling(each)
            if rng.random() < 0.5:
                book.failed(each, now)
        assert len(book) <= MAX_HINTS
    book.unlinked("node", 11.0)
    assert hosts(book, 11.0)[0] == "friend"


def test_replays_of_one_members_advert_crowd_out_neither_it_nor_others() -> None:
    book = HintBook()
    book.heard(hint("real", "x"), 0.0)
    for number in range(10_000):
        book.heard(hint(f"replay-{number}", "x"), number / 1000)
        for each in book.due(number / 1000):
            if each.host != "real":
                book.calling(each)
                book.failed(each, number / 1000)
    book.heard(hint("other", "y"), 11.0)
    assert {"real", "other"} <= set(hosts(book, 11.0))
    assert len(book) <= 9


def test_an_address_that_nobody_confirms_makes_room_after_a_while() -> None:
    book = HintBook()
    for number in range(MAX_HINTS):
        book.heard(hint(f"quiet-{number}"), 0.0)
    book.heard(hint("new"), 1.0)
    assert "new" not in hosts(book, 1.0)
    book.heard(hint("new"), 100.0)
    assert "new" in hosts(book, 100.0)


def test_another_process_at_a_known_address_is_called_afresh() -> None:
    book = HintBook()
    book.heard(hint("a", "x"), 0.0)
    book.calling(hint("a", "x"))
    book.reached(hint("a", "x"), "node", 0.0)
    book.linked("node")
    assert hosts(book, 10.0) == []
    book.heard(hint("a"), 10.0)
    assert hosts(book, 10.0) == [], "an address somebody wrote down tells of no other process"
    book.heard(hint("a", "z"), 10.0)
    assert hosts(book, 10.0) == ["a"]


def test_the_best_place_of_a_node_has_a_head_start_when_its_link_is_lost() -> None:
    book = HintBook()
    for host in ("wifi", "cable"):
        book.heard(hint(host, "x"), 0.0)
        for each in book.due(0.0):
            book.calling(each)
            book.reached(each, "node", 0.0)
    book.linked("node")
    book.prefer("node", hint("cable"))
    book.unlinked("node", 10.0)
    assert hosts(book, 10.0) == ["cable"]
    assert sorted(hosts(book, 10.3)) == ["cable", "wifi"], "but it may be what is broken"


# Adverts end.


def test_an_advert_that_was_heard_once_leads_somewhere_for_a_minute_only() -> None:
    book = HintBook()
    book.heard(hint("anywhere", "x"), 0.0)
    calls, now = [], 0.0
    while now < 3600:
        for each in book.due(now):
            book.calling(each)
            book.failed(each, now)
            calls.append(now)
        now += 1.0
    assert 55 < calls[-1] <= 60
    assert book.next_due(now) is None
    book.heard(hint("anywhere", "x"), now)
    assert hosts(book, now) == ["anywhere"], "it is there again"


def test_an_address_that_somebody_wrote_down_is_called_for_ever() -> None:
    book = HintBook()
    book.heard(hint("attic", "x"), 0.0)
    book.heard(hint("attic"), 1.0)
    book.heard(hint("cellar"), 1.0)
    assert hosts(book, 1e6) == ["attic", "cellar"]


def test_where_a_peer_was_is_called_for_an_hour_after_its_link() -> None:
    book = HintBook()
    reach(book, hint("attic", "x"), "node", 0.0)
    assert hosts(book, 10_000.0) == [], "linked"
    book.unlinked("node", 10_000.0)
    assert hosts(book, 13_000.0) == ["attic"]
    assert hosts(book, 14_000.0) == []


def test_replays_of_old_adverts_lead_nowhere_while_a_peer_is_there() -> None:
    book = HintBook()
    reach(book, hint("real", "x"), "node", 0.0)
    called = []
    for number in range(3600):
        now = float(number)
        book.heard(hint("real", "x"), now)
        book.heard(old(f"anywhere-{number % 8}", f"{number % 300:x}"), now)
        book.heard(old("real", "gone"), now)
        for each in book.due(now):
            book.calling(each)
            book.failed(each, now)
            called.append(each.host)
    assert called == []
    assert len(book) == 1


def test_a_replay_that_is_current_for_a_wrong_clock_hides_nobody() -> None:
    """Only a current advert that led to a peer says that the own clock is right."""
    book = HintBook()
    book.heard(hint("nobody", "r"), 0.0)
    book.heard(old("real", "x"), 0.0)
    assert hosts(book, 0.0) == ["nobody", "real"]


def test_a_node_that_is_left_alone_takes_any_advert_again() -> None:
    book = HintBook()
    reach(book, hint("real", "x"), "node", 0.0)
    book.heard(old("clockless", "y"), 1.0)
    assert "clockless" not in hosts(book, 1.0)
    book.unlinked("node", 50.0)
    book.heard(old("clockless", "y"), 61.0)
    assert "clockless" in hosts(book, 61.0)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, -50],
        [0, 0, -50],
        [-50, 0, 0],
        [0, 30, -50],
        [0, 0, 0, -50, 30],
        [-50, -50, 0],
    ],
)
def test_machines_whose_clocks_are_years_wrong_get_links_with_all(offsets: list[int]) -> None:
    """All hear all adverts; a call of either of two machines makes their link."""
    key, year, now = b"k" * 32, 365 * 86_400, 3_000_000 * WINDOW_S
    machines = [
        Presence(lambda: [key], 1, bytes([number]) * 16, lambda wrong=wrong: now + wrong * year)
        for number, wrong in enumerate(offsets)
    ]
    books = [HintBook() for _ in machines]
    links: set[frozenset[int]] = set()
    for second in range(60):
        for me, book in enumerate(books):
            for other, sender in enumerate(machines):
                if other != me and machines[me].recognises(sender.advert()):
                    book.heard(
                        machines[me].hint(sender.advert(), f"host-{other}", "beacon"), second
                    )
            for each in book.due(second):
                other = int(each.host.removeprefix("host-"))
                book.calling(each)
                book.reached(each, f"node-{other}", second)
                book.linked(f"node-{other}")
                books[other].linked(f"node-{me}")
                links.add(frozenset({me, other}))
    everybody = range(len(machines))
    assert links == {frozenset({a, b}) for a in everybody for b in everybody if a < b}


def test_two_pairs_with_clocks_of_their_own_need_a_written_address() -> None:
    """What is not promised: each pair has a current peer, and takes the others for replays."""
    book = HintBook()
    reach(book, hint("same-time", "x"), "node", 0.0)
    book.heard(old("other-time", "y"), 1.0)
    assert hosts(book, 1.0) == []
    book.heard(hint("other-time"), 2.0)
    assert hosts(book, 2.0) == ["other-time"]
