"""Control messages: what goes in comes out, what is too large or foreign does not come in."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from potluck._core.settings import load_settings
from potluck._core.types import Member
from potluck._core.wire import local, worker_link
from potluck.errors import ConfigurationError, ProtocolError

FROM_WORKER = [
    worker_link.Ready("0", after_epoch=3, port=5, pid=7, host="h", local_rank=1, cause="c"),
    worker_link.Ready("0", port=5, site="home/büro-2/rack_1/x.y"),
    worker_link.Entered("0", 4),
    worker_link.Lost("0", 4, 2, True, "cause", 60),
    worker_link.WorkerProgress(
        "0", 4, 60, 0.5, 812.0, "cpu", {"accuracy": 0.97, "n": 3, "ok": True, "text": "x"}
    ),
    worker_link.WorkerNote("0", "hello"),
    worker_link.Failed("0", "text", True),
    worker_link.Finished("0"),
    worker_link.ChaosDue("0", 4, 60),
    worker_link.ProbeReply("0", 1, True),
]
FROM_AGENT = [
    worker_link.NewGroup("job", 4, (Member("0", "n", "h", 1, 0), Member("1")), (60, 80)),
    worker_link.GroupOver(4, "2", True, "killed"),
    worker_link.Probe(9),
    worker_link.ChaosDone(60),
    worker_link.Stop("reason"),
]


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_what_a_worker_says_arrives(message: worker_link.FromWorker) -> None:
    data = worker_link.TO_AGENT.encode(message)
    assert worker_link.TO_AGENT.length(data[:4]) == len(data) - 4
    assert worker_link.TO_AGENT.decode(data[4:]) == message
    with pytest.raises(ProtocolError):
        worker_link.FROM_AGENT.decode(data[4:])


def test_how_a_job_is_doing_arrives() -> None:
    status = worker_link.JobState(
        *("job", "node", 1, "s.py", 1.0, 4, 60, None),
        (worker_link.WorkerStatus("0", 0, "member", 1, 0, "cpu", 60, 3.0),),
        ("event",),
        samples=worker_link.Samples(640, 6400, 812.5),
    )
    message = local.JobsReply((status,))
    assert local.REPLY.decode(local.REPLY.encode(message)[4:]) == message


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda message: type(message).__name__)
def test_what_an_agent_says_arrives(message: worker_link.FromAgent) -> None:
    data = worker_link.FROM_AGENT.encode(message)
    assert worker_link.FROM_AGENT.decode(data[4:]) == message
    with pytest.raises(ProtocolError):
        worker_link.TO_AGENT.decode(data[4:])


@pytest.mark.parametrize(
    "body",
    [b"", b"GET / HTTP/1.1", pickle.dumps({"a": 1}), b"\x81\xa4type\xa4None", b"\xc1" * 100],
)
def test_foreign_bytes_are_no_message(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        worker_link.TO_AGENT.decode(body)


@pytest.mark.parametrize(
    "site",
    ["/", "home/", "/rack", "a//b", "a b", "a\n", "a/b/c/d/e", "x" * 65, "\x1b[2J", "a\u202eb"],
)
def test_a_site_has_few_levels_of_plain_names(site: str) -> None:
    """As a worker reports it, as a view tells it, and as a setting."""
    for decode, data in (
        (worker_link.TO_AGENT.decode, worker_link.Ready("0", site=site)),
        (
            worker_link.FROM_AGENT.decode,
            worker_link.NewGroup("job", 4, (Member("0", site=site),)),
        ),
    ):
        with pytest.raises(ProtocolError, match="site"):
            decode(msgspec.msgpack.encode(data))
    with pytest.raises(ConfigurationError, match="the outermost first"):
        load_settings(site=site)


def test_texts_and_collections_are_bounded() -> None:
    for message in (
        worker_link.WorkerNote("0", "x" * (worker_link.MAX_TEXT + 1)),
        worker_link.WorkerProgress(
            "0", facts={str(n): n for n in range(worker_link.MAX_FACTS + 1)}
        ),
    ):
        with pytest.raises(ProtocolError):
            worker_link.TO_AGENT.decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("port", [-1, 65536, 1 << 40])
def test_a_worker_can_not_bring_a_port_that_no_view_could_hold(port: int) -> None:
    """A view with such a member would be refused by every node, and by its own disk."""
    with pytest.raises(ProtocolError, match="port"):
        worker_link.TO_AGENT.decode(msgspec.msgpack.encode(worker_link.Ready("0", port=port)))


def test_clipping_keeps_the_end_of_a_traceback() -> None:
    assert worker_link.clip("short") == "short"
    clipped = worker_link.clip("x" * 100_000 + "ValueError: no")
    assert len(clipped) == worker_link.MAX_TEXT
    assert clipped.endswith("ValueError: no")


@pytest.mark.parametrize(
    ("over", "epoch", "names", "ended"),
    [
        (worker_link.GroupOver(4, "2", True, ""), 4, ("0", "2"), True),
        (worker_link.GroupOver(4, "2", True, ""), 3, ("0", "2"), True),
        (worker_link.GroupOver(4, "2", True, ""), 5, ("0", "2"), False),
        (worker_link.GroupOver(4, "2", True, ""), 3, ("0", "1"), False),
        (worker_link.GroupOver(4, "", True, ""), 4, ("0", "1"), True),
        (worker_link.GroupOver(4, "", True, ""), 3, ("0", "1"), False),
    ],
)
def test_which_groups_a_message_ends(
    over: worker_link.GroupOver, epoch: int, names: tuple[str, ...], ended: bool
) -> None:
    assert over.ends(epoch, names) is ended
