"""The machine that leads the cluster is an attacker's, with an agent of its own making: it orders
jobs that their starters did not start, and passes its own off as others'."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.clusters import found_cluster
from support.hosts import Network
from support.machines import PSK, Machine, agreed, form, leader_of, marks

pytestmark = pytest.mark.needs_root_netns

# What the agent of the attacker does with each job that another machine hands in; the name of its
# script says which attack is to come first. Then the job is led as it should be.
ATTACKER = """
import asyncio, os
from pathlib import Path
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from potluck._core.cluster.jobs.dispatcher import JobDispatcher
from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck._core.cluster.trust.credentials import signed
from potluck._core.transport.credentials import node_id_of
from potluck._core.wire import jobs

leads, hears = JobDispatcher._submitted, JobDispatcher.received
seen, answers = {}, asyncio.Queue()

def submitted(self, node, spec, view):
    if spec.job not in seen:
        seen[spec.job] = spec
        self._tasks.start(attack(self, node, spec, view))

def received(self, node, message):
    if isinstance(message, jobs.NodeReport) or (
        isinstance(message, jobs.WorkerEvent) and isinstance(message.event, jobs.Exited)
    ):
        answers.put_nowait((node, message))
    hears(self, node, message)

async def attack(self, node, spec, view):
    try:
        await order(self, node, spec, view)
    except Exception as error:
        self._agent.note(f"the attack broke: {error!r}")
    leads(self, node, spec, view)

async def order(self, node, spec, view):
    what = spec.script.removesuffix(".py")
    homes = {"own_key": "POTLUCK_HOME", "banned_key": "BANNED"}
    if what.endswith("_key"):
        key = Ed25519PrivateKey.generate()
        if what in homes:
            key = load_or_create_identity(Path(os.environ[homes[what]]))
        package, _ = await self._code_store.take_in(Path(os.environ["EVIL"]), spec.script, ())
        change = {"package": package, "environment": (), "proof": None}
        change["starter"] = node_id_of(key.public_key())
        spec = signed(msgspec.structs.replace(spec, **change), key)
        if hasattr(self._agent, "vouching"):
            self._agent.vouching.ledger.begin(spec)
    elif what == "again":
        spec = next(iter(seen.values()))
    else:
        return
    while not answers.empty():
        answers.get_nowait()  # of the honest run of a job
    say = self._agent.links.send
    for target in view.nodes:
        if target == self._agent.me:
            continue
        places = (jobs.WorkerPlace("0", target, 0),)
        say(target, jobs.Order(spec, places, jobs.WorldSpec(members=("0",), master_port=29500)))
        error = "no answer"
        async with asyncio.timeout(60):
            while True:
                who, answer = await answers.get()
                if who == target and answer.job == spec.job:
                    if isinstance(answer, jobs.WorkerEvent):
                        break
                    error = answer.error
                    if error:
                        break
                    say(target, jobs.StartWorker(spec.job, "0", 0))
        name = self._agent.names.label(target)
        self._agent.note(f"attack {what} at {name}: {error or 'it ran'}")
        say(target, jobs.JobList(()))

JobDispatcher._submitted, JobDispatcher.received = submitted, received
"""

EVIL = """
import pathlib
home = pathlib.Path(__file__).resolve().parents[3]
try:
    got = "the key of the node" if (home / "node_keypair").read_text() else "an empty file"
except OSError as error:
    got = error.strerror
print("EVIL got", got, flush=True)
try:
    pathlib.Path({loot!r}).open("a").write(__file__ + " got " + got)
except OSError:
    pass
"""


@contextmanager
def led_by_an_attacker(root: Path, **of_ada: str) -> Iterator[tuple[Machine, Machine, Machine]]:
    """Ada, evil (which leads) and carl (which is not up), all in one closed cluster that ada
    founded; and in ``root``: ``code``, ada's scripts."""
    (root / "agent").mkdir()
    (root / "agent" / "sitecustomize.py").write_text(ATTACKER)
    names = ("own_key", "fresh_key", "banned_key", "first", "again")
    for folder in ("code", "evil"):
        (root / folder).mkdir()
        for name in names:
            text = "print('the script of ada', __file__, flush=True)\n"
            text += f"open({str(root / 'ran')!r}, 'a').write('ran {name}\\n')\n"
            evil = EVIL.format(loot=str(root / "loot"))
            (root / folder / f"{name}.py").write_text(text if folder == "code" else evil)
    of_evil = {
        "PYTHONPATH": str(root / "agent"),
        "EVIL": str(root / "evil"),
        "BANNED": str(root / "homes" / "carl"),
    }
    with Network(3) as network, ExitStack() as stack:
        ada, evil, carl = (
            stack.enter_context(Machine(host, root / "homes", psk="", **environment))
            for host, environment in zip(network, (of_ada, of_evil, {}), strict=True)
        )
        found_cluster(ada.home, evil.home, carl.home, psk=bytes.fromhex(PSK))
        form(evil)
        ada.start()
        ada.wait_until_up()
        agreed(ada, evil)
        assert leader_of((ada, evil)) is evil
        yield ada, evil, carl


def runs(ada: Machine, evil: Machine, script: Path) -> tuple[str, str]:
    """What the job of ``script`` said, and what the attack that came before it."""
    since = evil.mark
    with ada.run("--nodes", "1", script) as run:
        assert run.finish() == 0, run.text
    evil.says("attack ", since=since)
    said = [line for line in evil.command.lines[since:] if "attack " in line]
    return run.text, "\n".join(said)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_a_script_that_is_let_into_the_sandbox_does_not_run_as_the_owners_own(
    tmp_path: Path,
) -> None:
    """The leader orders a job of its own under the name of ada's, lets it end, then orders ada's:
    that runs outside of the sandbox, from the folder of that name."""
    with led_by_an_attacker(tmp_path, POTLUCK_SANDBOX="1", POTLUCK_RUN_FOR="all") as machines:
        ada, evil, _ = machines
        said, attack = runs(ada, evil, tmp_path / "code" / "own_key.py")
        assert "attack own_key at ada: it ran" in attack, "in the sandbox, as ada allows"
        assert "the script of ada" in said
        assert "EVIL" not in said
        assert not (tmp_path / "loot").exists(), (tmp_path / "loot").read_text()


def test_what_a_key_signs_that_is_not_on_the_list_runs_nowhere(tmp_path: Path) -> None:
    """Ada runs scripts of all members but the leader, which can make as many keys as it likes, and
    has that of a machine that was banned."""
    with led_by_an_attacker(tmp_path, POTLUCK_RUN_FOR="all") as (ada, evil, carl):
        assert ada.runs("deny", evil.node).returncode == 0
        assert ada.runs("allow", carl.node).returncode == 0
        assert ada.runs("ban", carl.node, "--yes").returncode == 0
        for name, why in (
            ("own_key", "its owner does not let it run jobs of bob"),
            ("fresh_key", "was never admitted to this cluster"),
            ("banned_key", "is banned from this cluster"),
        ):
            said, attack = runs(ada, evil, tmp_path / "code" / f"{name}.py")
            assert why in attack, attack
            assert "the script of ada" in said
        assert not (tmp_path / "loot").exists(), (tmp_path / "loot").read_text()
        assert carl.node not in (ada.home / "sharing.json").read_text().partition("denied")[0]


def test_a_job_that_is_over_runs_on_no_machine_again(tmp_path: Path) -> None:
    """Neither on the one that ran it, nor on one that came later and asks its starter."""
    with led_by_an_attacker(tmp_path, POTLUCK_RUN_FOR="all") as (ada, evil, carl):
        with ada.run("--nodes", "1", tmp_path / "code" / "first.py") as run:
            assert run.finish() == 0, run.text
        since = marks([ada, evil])
        carl.environment["POTLUCK_RUN_FOR"] = "all"
        carl.start()
        carl.wait_until_up()
        agreed(ada, evil, carl, since=since | {carl: 0})
        _, attack = runs(ada, evil, tmp_path / "code" / "again.py")
        evil.says("attack again at carl: ", since=since[evil])
        attack = "\n".join(evil.command.lines[since[evil] :])
        assert "attack again at ada: it is over here: a job runs once" in attack
        assert "attack again at carl: the node that started it says that it does not run" in attack
        assert (tmp_path / "ran").read_text().splitlines() == ["ran first", "ran again"]
        for machine in (ada, evil, carl):
            paths = [machine.home, *machine.home.rglob("*")]
            assert len(paths) > 10
            assert not [path for path in paths if path.stat().st_mode & 0o077]
