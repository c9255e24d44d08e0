"""docs/walk.md, typed as it stands by a person at two machines."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.hosts import Network
from support.pages import DOCS, snippets
from support.walking import Person, paired

pytestmark = pytest.mark.needs_root_netns


def test_the_walk_typed_as_it_stands_trains_on_both_machines(tmp_path: Path) -> None:
    with ExitStack() as stack:
        left, right = stack.enter_context(Network(2))
        desk = Person(left, "desk", tmp_path, stack)
        laptop = Person(right, "laptop", tmp_path, stack)
        (desk.folder / "script.py").write_text(snippets("walk.md")[0])

        alone = desk.types("potluck run --workers 2 script.py")
        assert alone.finish() == 0, alone.text
        assert "[0] rank 0 of 2: 1.5" in alone.text

        agent = desk.types("potluck up")
        agent.read_until(lambda _: "founds a cluster" in agent.text)

        pair, join = paired(desk, laptop)
        assert "laptop is in, as member" in pair.text
        assert "To take part, run: potluck up" in join.text

        second = laptop.types("potluck up")
        second.read_until(lambda _: "laptop (" in second.text and "joins" in second.text)
        status = desk.types("potluck status")
        assert status.finish() == 0, status.text
        assert re.search(r"laptop │ member │ up", status.text), status.text
        assert "engine: " in status.text

        both = desk.types("potluck run script.py")
        assert both.finish() == 0, both.text
        assert "starting 2 workers on desk, laptop" in both.text
        assert re.search(r"\[0 desk\] rank 0 of 2: 1.5", both.text), both.text
        assert re.search(r"\[1 laptop\] rank 1 of 2: 1.5", both.text), both.text

        (desk.folder / "save.py").write_text(snippets("walk.md")[2])
        saving = desk.types("potluck run save.py")
        assert saving.finish() == 0, saving.text
        told = r"written on desk \(1, 11 bytes\), laptop \(1, 11 bytes\): potluck fetch (save-\w+)"
        (job,) = re.findall(told, " ".join(saving.text.split()))
        fetching = desk.types("potluck fetch save-14e60dab", job)
        assert fetching.finish() == 0, fetching.text
        assert "2 files (22 bytes) brought into" in fetching.text
        brought = {path.name: path.read_text() for path in (desk.folder / job).iterdir()}
        assert brought == {"rank.desk.txt": "rank 0 of 2", "rank.laptop.txt": "rank 1 of 2"}

        example = (DOCS.parent / "examples" / "digits.py").read_text()
        short = example.replace("EPOCHS, ACCURACY = 30, 0.97", "EPOCHS, ACCURACY = 15, 0.97")
        assert short != example, "the same accuracy in half the epochs"
        (desk.folder / "digits.py").write_text(short)
        training = desk.types("potluck run digits.py")
        assert training.finish() == 0, training.text
        assert "starting 2 workers on desk, laptop" in training.text
        assert re.search(r"parameters +equal on all", training.text), training.text
        for terminal in (agent, second):
            assert "may scripts of" not in terminal.text, "the pairing has asked"


@pytest.mark.real_exec
def test_an_agent_that_runs_goes_over_to_the_cluster_that_its_machine_joins(
    tmp_path: Path,
) -> None:
    """As `potluck join` says."""
    with ExitStack() as stack:
        left, right = stack.enter_context(Network(2))
        desk = Person(left, "desk", tmp_path, stack)
        laptop = Person(right, "laptop", tmp_path, stack)
        agents = [each.types("potluck up") for each in (desk, laptop)]
        for agent in agents:
            agent.read_until(lambda _, agent=agent: "founds a cluster" in agent.text)
        _, join = paired(desk, laptop)
        assert "The agent that runs here goes over to it by itself" in join.text
        together = re.compile(
            r"epoch \d+: .*desk \(\w+\), laptop|epoch \d+: .*laptop \(\w+\), desk"
        )
        for agent in agents:
            agent.read_until(lambda _, agent=agent: together.search(agent.text) is not None)
            assert together.search(agent.text), agent.text
        (desk.folder / "script.py").write_text(snippets("walk.md")[0])
        both = desk.types("potluck run script.py")
        assert both.finish() == 0, both.text
        assert "starting 2 workers on desk, laptop" in both.text
