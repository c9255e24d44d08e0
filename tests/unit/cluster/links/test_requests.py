"""Requests to other nodes: each has one response, from the node that was asked, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from potluck._core.cluster.links.peers import Requests
from potluck._core.wire.jobs import JobRuns
from potluck._core.wire.peers import Failure, NodeServices
from potluck.errors import LinkError, ProtocolError

ADA, EVE = "a1" * 32, "e5" * 32


class Story:
    """Requests to ADA, with the numbers that were sent."""

    def __init__(self, *, is_linked: bool = True) -> None:
        self.requests = Requests()
        self.numbers: list[int] = []
        self._is_linked = is_linked

    def ask(self, timeout_s: float | None = 20.0) -> Coroutine[Any, Any, JobRuns]:
        return self.requests.ask(ADA, JobRuns, self._send, timeout_s=timeout_s)

    def _send(self, number: int) -> bool:
        self.numbers.append(number)
        return self._is_linked

    async def begun(self, *asking: Coroutine[Any, Any, JobRuns]) -> list[asyncio.Task[JobRuns]]:
        tasks = [asyncio.create_task(each) for each in asking]
        await asyncio.sleep(0)
        return tasks


def test_each_request_gets_its_own_response_in_whatever_order() -> None:
    async def play() -> None:
        story = Story()
        first, second = await story.begun(story.ask(), story.ask(None))
        story.requests.answered(ADA, story.numbers[1], JobRuns(True))
        story.requests.answered(ADA, story.numbers[0], JobRuns(False))
        assert [(await each).runs for each in (first, second)] == [False, True]

    asyncio.run(play())


def test_no_other_node_answers_and_none_twice_or_unasked() -> None:
    async def play() -> None:
        story = Story()
        [asked] = await story.begun(story.ask())
        [number] = story.numbers
        story.requests.answered(EVE, number, JobRuns(False))
        story.requests.answered(ADA, number + 1, JobRuns(False))
        story.requests.answered(ADA, number, JobRuns(True))
        story.requests.answered(ADA, number, JobRuns(False))
        assert (await asked).runs
        story.requests.answered(ADA, number, JobRuns(False))

    asyncio.run(play())


def test_what_is_no_answer_is_an_error_that_says_why() -> None:
    async def play() -> None:
        with pytest.raises(LinkError, match="there is no link to node a1a1"):
            await Story(is_linked=False).ask()
        with pytest.raises(LinkError, match=r"node a1a1.* did not answer for 0\.01 s"):
            await Story().ask(0.01)
        story = Story()
        refused, other = await story.begun(story.ask(), story.ask())
        story.requests.answered(ADA, story.numbers[0], Failure("it was asked too much at once"))
        story.requests.answered(ADA, story.numbers[1], NodeServices())
        with pytest.raises(LinkError, match="asked too much"):
            await refused
        with pytest.raises(ProtocolError, match="answered with NodeServices"):
            await other

    asyncio.run(play())


def test_a_link_that_ends_ends_the_requests_over_it_and_no_others() -> None:
    async def play() -> None:
        story = Story()
        ada, left = await story.begun(story.ask(), story.ask())
        left.cancel()  # the command that asked has left
        await asyncio.gather(left, return_exceptions=True)
        story.requests.lost("the link ended", EVE)
        assert not ada.done()
        story.requests.lost("the link ended", ADA)
        with pytest.raises(LinkError, match="the link ended"):
            await ada
        [again] = await story.begun(story.ask())
        story.requests.lost("the agent has ended")
        with pytest.raises(LinkError, match="the agent has ended"):
            await again

    asyncio.run(play())
