"""What ``potluck up`` asks its owner about new machines, and what the answers do."""

from __future__ import annotations

import asyncio

from potluck.cli.asking import Questions


class Owner:
    """Decisions about ``nodes``, and what was printed."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = list(nodes)
        self.decided: dict[str, bool] = {}
        self.said: list[str] = []
        self.questions = Questions(self, str.upper, "ada", self.said.append)

    def undecided(self) -> tuple[str, ...]:
        return tuple(node for node in self.nodes if node not in self.decided)

    async def decide(self, node: str, *, is_allowed: bool) -> None:
        self.decided[node] = is_allowed
        self.questions.look()  # it listens to changes


def test_one_machine_is_asked_about_at_a_time() -> None:
    owner = Owner("bob", "carl")
    owner.questions.look()
    owner.questions.look()
    assert owner.said == [
        "may scripts of BOB run on this machine, as ada? y or n, then Enter",
    ]
    asyncio.run(owner.questions.answer("Yes\n"))
    assert owner.decided == {"bob": True}
    assert len(owner.said) == 2
    assert "CARL" in owner.said[1]
    asyncio.run(owner.questions.answer("n\n"))
    assert owner.decided == {"bob": True, "carl": False}


def test_what_is_no_answer_decides_nothing() -> None:
    owner = Owner("bob")
    asyncio.run(owner.questions.answer("y\n"))
    assert owner.decided == {}, "nothing was asked yet"
    owner.questions.look()
    for line in ("\n", "maybe\n", "yup\n"):
        asyncio.run(owner.questions.answer(line))
    assert owner.decided == {}
    assert len(owner.said) == 4, "it asks again"


def test_a_decision_made_elsewhere_ends_the_question() -> None:
    owner = Owner("bob")
    owner.questions.look()
    asyncio.run(owner.decide("bob", is_allowed=False))  # by potluck deny
    asyncio.run(owner.questions.answer("y\n"))
    assert owner.decided == {"bob": False}


def test_an_open_question_is_asked_again_below_each_line_of_others() -> None:
    owner = Owner("bob")
    owner.questions.remind()
    assert owner.said == [], "nothing was asked yet"
    owner.questions.look()
    owner.said.append("epoch 3: ...")
    owner.questions.remind()
    assert [("BOB" in line) for line in owner.said] == [True, False, True]
    asyncio.run(owner.questions.answer("y\n"))
    owner.questions.remind()
    assert len(owner.said) == 3
