"""Control groups: where one is made, on trees of files as the kernel would show them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from potluck._core.cluster.sharing import cgroups
from potluck._core.cluster.sharing.limits import Limits

BOTH = "cpuset cpu io memory pids"


class Tree:
    """A mounted tree of control groups, with this process in the group ``own``. ``on`` are groups
    whose children have the controllers, ``others`` groups with other processes."""

    def __init__(
        self,
        folder: Path,
        own: str,
        *,
        on: tuple[str, ...] = (),
        others: tuple[str, ...] = (),
        controllers: str = BOTH,
    ) -> None:
        self.mounted = folder / "cgroup"
        self.proc = folder / "proc"
        self.proc.mkdir()
        (self.mounted / own).mkdir(parents=True)
        (self.proc / "cgroup").write_text(f"4:memory:/old\n0::/{own}\n")
        mount = f"30 20 0:26 / {self.mounted} rw,relatime - cgroup2 cgroup2 rw\n"
        (self.proc / "mountinfo").write_text(f"29 20 0:25 / / rw - ext4 /dev/vda rw\n{mount}")
        parts = Path(own).parts
        for name in ("/".join(parts[:depth]) for depth in range(len(parts) + 1)):
            pids = [*([os.getpid()] if name == own else []), *([1, 2] if name in others else [])]
            path = self.mounted / name
            (path / "cgroup.controllers").write_text(controllers)
            (path / "cgroup.subtree_control").write_text(controllers if name in on else "")
            (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def find(self, *mine: str) -> str:
        """The group that is found, below the mounted one, if this process may write in ``mine``; or
        why there is none."""
        places = [self.mounted / each for each in mine]
        found = cgroups.find_parent(self.proc, lambda path: path in places or path.parent in places)
        return found if isinstance(found, str) else str(found.relative_to(self.mounted))


def test_the_nearest_group_above_that_may_be_written_is_taken(tmp_path: Path) -> None:
    """A terminal: the group of this process has others, those above have none."""
    own = "user/app/run.scope"
    tree = Tree(tmp_path, own, on=("", "user", "user/app"), others=(own,))
    assert tree.find("user/app", "user", "", own) == "user/app"
    assert tree.find("user", own) == "user"
    assert tree.find("") == "."


def test_the_group_of_a_service_is_taken_if_it_was_given_to_it(tmp_path: Path) -> None:
    """A systemd service with Delegate=yes, or with DelegateSubgroup= as well."""
    tree = Tree(tmp_path, "system/potluck.service", on=("", "system"))
    assert tree.find("system/potluck.service") == "system/potluck.service"
    (tmp_path / "below").mkdir()
    tree = Tree(tmp_path / "below", "system/potluck.service/agent", on=("", "system"))
    assert tree.find("system/potluck.service") == "system/potluck.service"


@pytest.mark.parametrize(
    ("controllers", "mine", "said"),
    [
        (BOTH, (), "a systemd service may, with Delegate=yes"),
        (BOTH, ("user/shell.scope",), "a systemd service may, with Delegate=yes"),
        ("memory pids", ("",), "the controllers cpu and memory .* are not in use here"),
        ("", ("user",), "the controllers cpu and memory .* are not in use here"),
    ],
)
def test_why_there_is_none_is_said(
    tmp_path: Path, controllers: str, mine: tuple[str, ...], said: str
) -> None:
    own = "user/shell.scope"
    tree = Tree(tmp_path, own, on=("", "user"), others=(own,), controllers=controllers)
    found = tree.find(*mine)
    assert re.search(said, found), found


def test_a_system_without_control_groups_says_so(tmp_path: Path) -> None:
    assert cgroups.find_parent(tmp_path) == "this system has no control groups of version 2"
    tree = Tree(tmp_path, "app")
    (tree.proc / "cgroup").write_text("0::/../..\n")
    assert tree.find("") == "the control group of this process is not visible here"


def test_a_group_is_made_with_its_limits(tmp_path: Path) -> None:
    own = "system/potluck.service"
    tree = Tree(tmp_path, own, on=("", "system"))
    service, real = tree.mounted / own, Path.mkdir

    def mkdir(path: Path, **how: bool) -> None:
        """What the kernel puts into a new group."""
        real(path, **how)
        (path / "memory.events").write_text("low 0\nmax 3\noom 0\noom_kill 0\noom_group_kill 0\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        patch.setattr(os, "access", lambda path, mode: str(path).startswith(str(service)))
        group = cgroups.make(Limits(cpus=3, memory_bytes=1 << 30), tree.proc)
    assert isinstance(group, cgroups.Cgroup)
    assert group.path.parent == service
    assert (service / "potluck-agent" / "cgroup.procs").read_text() == "0", "the agent made room"
    assert (service / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (group.path / "cpu.max").read_text() == "300000 100000"
    assert (group.path / "memory.max").read_text() == str(1 << 30)
    assert not group.was_out_of_memory()
    (group.path / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert group.was_out_of_memory()
    assert not group.was_out_of_memory(), "told once"
