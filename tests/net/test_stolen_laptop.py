"""A machine of the cluster is stolen, banned, and tries everything to come back: its own key, a new
key, the old secret, a link kept open, its friends' addresses. It gets no byte of work, and never
the next secret."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.clusters import found_cluster
from support.figures import Figures
from support.hosts import Network
from support.machines import PSK, Machine, agreed, cluster_of, form, marks

pytestmark = pytest.mark.needs_root_netns

PAGE = "security"

# An agent of the thief's own making: it talks to anybody, whatever key or list they have.
THIEF = """
import asyncio, json, sys
from contextlib import ExitStack
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck.errors import PotluckError
from potluck._core.transport import aio
from potluck._core.wire import admissions, peers
from potluck._core.wire.greeting import Hello
from support.links import make_credentials

home, psk, hosts = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3:]
keys = {"its own key": load_or_create_identity(home), "a new key": Ed25519PrivateKey.generate()}

async def attempt(key, host, kind):
    credentials = make_credentials(psk, key)
    hello = Hello(kind, job="any", epoch=1, rank=0, to_rank=0)
    try:
        reader, writer, _ = await aio.connect(host, 52415, hello, credentials, timeout_s=60)
    except (PotluckError, TimeoutError) as error:
        return type(error).__name__ + ": " + str(error)
    writer.write(peers.MESSAGE.encode(peers.Introduction(
        1, "thief", credentials.public_key, 1, own_versions())))
    writer.write(peers.MESSAGE.encode(admissions.SecretWanted(
        credentials.namespace, bytes(8))))
    try:
        async with asyncio.timeout(3):
            return "HEARD " + repr(await reader.read(65536))
    except TimeoutError:
        return "HEARD nothing, but is welcome"
    finally:
        await aio.end(writer)

async def main():
    for name, key in keys.items():
        for host in hosts:
            for kind in ("node", "client", "worker", "measure", "data"):
                print(json.dumps([name, host, kind, await attempt(key, host, kind)]), flush=True)

asyncio.run(main())
"""


def attempts(thief: Machine, psk: str, *victims: Machine) -> list[list[str]]:
    """What the thief's own program gets from ``victims`` under ``psk``: key, host, kind, answer."""
    script = [sys.executable, "-c", THIEF, str(thief.home), psk]
    done = subprocess.run(
        thief.host.command([*script, *(each.host.address for each in victims)]),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def secret(machine: Machine) -> str:
    return (machine.home / "cluster_secret").read_text().strip()


def all_have_the_newest_secret(status: dict[str, Any]) -> bool:
    cluster = status["cluster"]
    return {each["secret"] for each in cluster["nodes"]} == {cluster["namespace"]}


def test_a_stolen_laptop_never_comes_back(figures: Figures, tmp_path: Path) -> None:
    loot = tmp_path / "loot.txt"
    steal = tmp_path / "code" / "steal.py"
    steal.parent.mkdir()
    steal.write_text(f"open({str(loot)!r}, 'a').write(__import__('os').environ['POTLUCK_NAME'])\n")
    with cluster_of(4, tmp_path / "homes", psk="") as machines:
        ada, bob, stolen, copy = machines
        found_cluster(*(each.home for each in (ada, bob, stolen)), psk=bytes.fromhex(PSK))
        form(ada, bob, stolen)
        # The thief copies the disk: another machine with the same key, secret and list.
        shutil.rmtree(copy.home)
        shutil.copytree(stolen.home, copy.home)
        since = marks([ada, stolen])
        bob.kill()  # away while it happens
        # A ban before that view would leave ada alone with bob, who is senior, to decide.
        agreed(ada, stolen, since=since)
        since = marks([ada, bob, stolen])
        # ``stolen`` stays up: its link was made while it was a member.
        assert ada.runs("ban", stolen.name, "--reason", "stolen", "--yes").returncode == 0
        stolen.says("this node is banned from the cluster", since=since[stolen])
        agreed(ada, since=since)
        bob.start()
        agreed(ada, bob, since=since)
        ada.shows(all_have_the_newest_secret)
        assert secret(bob) == secret(ada) != PSK

        answers = attempts(stolen, PSK, ada, bob)
        got_in = [each for each in answers if not each[3].startswith("Refused: ")]
        assert not got_in, got_in
        for name in ("its own key", "a new key"):
            why = "banned" if name == "its own key" else "never admitted"
            assert all(why in each[3] for each in answers if each[0] == name), answers
        fault = "stolen laptop, banned"
        what = f"let in, of {len(answers)} attempts:"
        figures.take(fault, what, len(got_in), asked=0, unit="", page=PAGE)

        copy.start()
        copy.wait_until_up()
        for thief in (stolen, copy):
            ran = thief.runs("run", str(steal))
            assert "bob" not in ran.stdout + ran.stderr
        # The next secret does not reach it either.
        assert ada.runs("rotate").returncode == 0
        ada.shows(all_have_the_newest_secret)
        assert secret(bob) == secret(ada)
        answers = attempts(stolen, PSK, ada, bob)
        assert all(each[3].startswith("Refused: ") for each in answers), answers
        assert secret(stolen) == secret(copy) == PSK
        ran_on = loot.read_text() if loot.exists() else ""
        assert "ada" not in ran_on
        assert "bob" not in ran_on
        for each in (ada, bob):
            assert stolen.node not in {n["node"] for n in each.cluster()["nodes"]}
        figures.take(fault, "scripts that it ran on others:", 0, asked=0, unit="", page=PAGE)


SLOW_CLOCK = """
import time
_right = time.time
time.time = lambda: _right() - 5 * 365 * 86400.0
"""


def test_a_machine_whose_clock_is_years_behind_does_not_hear_an_admission_that_has_ended(
    tmp_path: Path,
) -> None:
    """By that clock the laptop is welcome for five more years."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SLOW_CLOCK)
    homes, slow = tmp_path / "homes", {"PYTHONPATH": str(tmp_path / "clock")}
    with Network(3) as network, ExitStack() as stack:
        ada, bob, laptop = (
            stack.enter_context(Machine(host, homes, psk="", **clock))
            for host, clock in zip(network, ({}, slow, {}), strict=True)
        )
        found_cluster(ada.home, bob.home, laptop.home, psk=bytes.fromhex(PSK))
        form(ada, bob, laptop)
        since = marks([ada, bob, laptop])
        assert ada.runs("admit", laptop.name, "--days", "0.00001").returncode == 0
        laptop.says("this node is banned from the cluster", since=since[laptop])
        agreed(ada, bob, since=since)
        bob.shows(lambda status: laptop.node in status["cluster"]["banned"])  # ada's word
        answers = attempts(laptop, PSK, ada, bob)
        assert all(each[3].startswith("Refused: ") for each in answers), answers
        by_key = [each[3] for each in answers if each[0] == "its own key"]
        assert all("its admission has ended" in answer for answer in by_key), answers
        assert ada.runs("rotate").returncode == 0
        ada.shows(all_have_the_newest_secret)
        assert secret(bob) == secret(ada) != PSK
        assert secret(laptop) == PSK


def test_a_stolen_founder_is_out_by_two_of_three_codes_whatever_it_ordered_before(
    figures: Figures, tmp_path: Path
) -> None:
    """The codes are made while the cluster works. The thief bans one of the code holders first, and
    makes codes of its own, from a list as it was before. The code is the person's, not the
    machine's."""
    with cluster_of(4, tmp_path / "homes", psk="") as machines:
        stolen, bob, carl, dora = machines
        homes = [each.home for each in machines]
        found_cluster(*homes, psk=bytes.fromhex(PSK))
        form(*machines)
        for each in (bob, carl, dora):
            assert stolen.runs("admit", each.name, "--admin").returncode == 0
        bob.shows(lambda status: roles(bob)[bob.node] == "admin")
        without_codes = (stolen.home / "admissions").read_bytes()
        made = stolen.runs("init", "--recovery-codes", "3", "--json")
        assert made.returncode == 0, made.stderr
        codes = json.loads(made.stdout)["recovery_codes"]
        for each in (bob, carl, dora):
            each.shows(lambda status, each=each: has_codes(each))
            assert roles(each)[stolen.node] == "admin"
        assert not any(
            code.encode() in path.read_bytes()
            for code in codes
            for path in stolen.home.rglob("*")
            if path.is_file()
        )
        since = marks(machines)
        dora.kill()  # away while it happens
        agreed(stolen, bob, carl, since=since)
        since = marks(machines)
        banned = stolen.runs("ban", carl.name, "--yes")
        assert banned.returncode == 0, banned.stderr
        bob.shows(lambda status: carl.node in status["cluster"]["banned"])
        bob.shows(all_have_the_newest_secret)
        thiefs = secret(stolen)

        # Codes of the thief's: whoever knows the right ones cuts it off, and keeps them.
        since = marks(machines)
        stolen.kill()
        kept = (stolen.home / "admissions").read_bytes()
        (stolen.home / "admissions").write_bytes(without_codes)
        rival = stolen.runs("init", "--recovery-codes", "1", "--json")
        assert rival.returncode == 0, rival.stderr
        stolen.start()
        bob.says("it has other recovery codes for this cluster", since=since[bob])
        assert has_codes(bob)
        stolen.kill()
        (stolen.home / "admissions").write_bytes(kept)
        stolen.start()
        since[stolen] = marks(machines)[stolen]
        agreed(stolen, bob, since=since)

        # No machine's own key does it, and not one code.
        refused = bob.runs("ban", stolen.name, "--yes")
        assert refused.returncode != 0
        assert "--codes" in refused.stderr
        one = bob.runs("ban", stolen.name, "--codes", "--yes", stdin=f"{codes[0]}\n" * 2)
        assert one.returncode != 0
        assert "2 different recovery codes" in one.stderr
        done = bob.runs("ban", stolen.name, "--codes", "--yes", stdin=f"{codes[0]}\n{codes[2]}\n")
        assert done.returncode == 0, done.stderr
        stolen.says("this node is banned from the cluster", since=since[stolen])
        unbanned = bob.runs("unban", carl.name, "--yes")
        assert unbanned.returncode == 0, unbanned.stderr
        dora.start()
        agreed(bob, carl, dora, since=since)
        bob.shows(all_have_the_newest_secret)
        assert secret(bob) == secret(carl) == secret(dora)
        assert secret(bob) not in (PSK, thiefs)

        # What the thief orders from now on has no force, on no machine.
        stolen.runs("ban", bob.name, "--yes")
        stolen.runs("rotate")
        answers = attempts(stolen, PSK, bob, carl, dora)
        answers += attempts(stolen, thiefs, bob, carl, dora)
        # Machines that were away or banned meanwhile never had the thief's secret.
        refusals = ("Refused: ", "WrongSecret: ")
        got_in = [each for each in answers if not each[3].startswith(refusals)]
        assert not got_in, got_in
        for each in (bob, carl, dora):
            said = roles(each)
            assert said[stolen.node] == "revoked"
            assert said[bob.node] == "admin"
            assert said[carl.node] == said[dora.node] == "member"
        fault = "stolen founder, banned by two of three codes"
        what = f"let in, of {len(answers)} attempts:"
        figures.take(fault, what, len(got_in), asked=0, unit="", page=PAGE)

        # The new admin bans.
        since = marks(machines)
        assert bob.runs("ban", dora.name, "--yes").returncode == 0
        agreed(bob, carl, since=since)
        assert roles(carl)[dora.node] == "revoked"


def has_codes(machine: Machine) -> bool:
    """Whether two recovery codes ban any machine, by the list of ``machine``."""
    return bool(json.loads(machine.runs("nodes", "--json").stdout)["codes_needed"] == 2)


def roles(machine: Machine) -> dict[str, str]:
    """The role of each node, by the list of ``machine``."""
    listed = json.loads(machine.runs("nodes", "--json").stdout)["nodes"]
    return {each["node"]: each["role"] for each in listed}
