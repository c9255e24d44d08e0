"""The part of a machine that its owner gives: what is written, and what the cluster sees of it."""

from __future__ import annotations

import pytest

from potluck._core.cluster.sharing import cgroups, confinement
from potluck._core.cluster.sharing.confinement import Confinement
from potluck._core.cluster.sharing.limits import Limits, limits_of, parse_memory
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.settings import Settings
from potluck._core.wire.facts import NodeFacts
from potluck._core.wire.jobs import JobSpec
from potluck.errors import ConfigurationError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("8 g", 8 * GIB),
        ("8gb", 8 * GIB),
        ("8Gi", 8 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("500MiB", 500 << 20),
        ("50%", 8 * GIB),
        ("100%", 16 * GIB),
        ("1073741824", GIB),
    ],
)
def test_memory_is_a_size_or_a_part(text: str, size: int) -> None:
    assert parse_memory(text, 16 * GIB) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "write a size"),
        ("-1G", "write a size"),
        ("0%", "write a size"),
        ("101%", "write a size"),
        ("1P", "write a size"),
        ("9" * 400, "write a size"),
        ("100MiB", "a worker needs at least 256 MiB"),
        ("17G", "this machine has 16 GiB"),
    ],
)
def test_memory_that_can_not_be_given_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--memory '?{text}.*{said}"):
        parse_memory(text, 16 * GIB)


def test_more_processors_than_there_are_can_not_be_given() -> None:
    with pytest.raises(ConfigurationError, match="--cpus 9: this machine has 8"):
        limits_of(Settings(cpus=9), cores=8, memory_bytes=GIB)
    assert limits_of(Settings(cpus=8), cores=8, memory_bytes=GIB) == Limits(), "all of them"


@pytest.mark.parametrize("text", [",", "0,", "0;1", "GPU 1"])
def test_gpus_that_mean_nothing_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--gpus '.*write none, or the numbers or ids"):
        limits_of(Settings(gpus=text), cores=8, memory_bytes=GIB)


def test_the_cluster_sees_what_is_given() -> None:
    facts = NodeFacts("ada", 8, 16 * GIB, ("A", "B", "C"))
    settings = Settings(cpus=3, memory="25%", gpus="2,0,7", nice=5)
    limits = limits_of(settings, cores=8, memory_bytes=16 * GIB)
    assert limits.reduced(facts) == NodeFacts("ada", 3, 4 * GIB, ("C", "A"))
    assert limits.describe() == "3 processors, 4 GiB of memory, GPU 2,0,7, nice 5"
    assert limits.processors(range(8)) == [5, 6, 7]
    assert Limits().reduced(facts) == facts
    assert Limits().describe() == ""
    assert Limits(gpus=()).reduced(facts).accelerators == ()
    assert Limits(gpus=("GPU-8f2a",)).reduced(facts).accelerators == ("A",), (
        "by its id: one of them"
    )


def test_libraries_see_the_gpus_that_are_given() -> None:
    assert Confinement(Limits()).variables() == {}
    given = Confinement(Limits(gpus=("0", "2"))).variables()
    assert given == {"CUDA_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "0,2"}
    assert Confinement(Limits(gpus=())).variables()["CUDA_VISIBLE_DEVICES"] == ""


def test_no_limit_gives_no_order() -> None:
    assert Confinement(Limits()).orders(2) == {}
    assert Confinement(Limits()).describe() == ""
    assert Confinement(Limits()).why_ended(-9, said_so=True) == ""


def test_without_a_control_group_it_is_said_what_is_not_enforced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "make", lambda limits: "there are none here")
    held = Confinement(Limits(memory_bytes=GIB))
    enforced = "by limits of each worker: there are none here; not enforced: shared memory"
    assert held.describe() == f"1 GiB of memory ({enforced})"
    assert held.orders(2) == {"data": GIB // 2}
    assert "not enforced" not in Confinement(Limits(cpus=1)).describe()


def asking(job: str, **options: int) -> JobSpec:
    return JobSpec(
        script="x.py", job=job, package=None, starter="ada", versions=own_versions(), **options
    )


def test_each_job_gets_cores_and_gpus_that_the_others_do_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confinement, "usable_cpus", lambda: [*range(8)])
    machine = Confinement(Limits(), num_gpus=lambda: 2)
    assert machine.part_of(asking("all")) is machine
    one = machine.part_of(asking("one", cores=3, gpus=1, memory_bytes=GIB))
    two = machine.part_of(asking("two", cores=3, gpus=1))
    assert one.orders(2) == {"cpus": [0, 1, 2], "data": GIB // 2}
    assert two.orders(1) == {"cpus": [3, 4, 5]}
    assert one.processors() == 3
    assert one.variables()["CUDA_VISIBLE_DEVICES"] == "0"
    assert two.variables()["CUDA_VISIBLE_DEVICES"] == "1"
    assert machine.part_of(asking("none", cores=1)).variables()["CUDA_VISIBLE_DEVICES"] == ""
    machine.give_back("one")
    assert machine.part_of(asking("four", cores=3)).orders(1) == {"cpus": [0, 1, 2]}


def test_a_job_gets_its_part_of_what_the_owner_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "usable_cpus", lambda: [*range(8)])
    monkeypatch.setattr(cgroups, "make", lambda limits: "there are none here")
    machine = Confinement(Limits(cpus=3, memory_bytes=4 * GIB, gpus=("2", "5"), nice=7))
    part = machine.part_of(asking("job", cores=2, gpus=1))
    assert part.orders(2) == {"cpus": [5, 6], "data": 2 * GIB, "nice": 7}
    assert part.variables()["CUDA_VISIBLE_DEVICES"] == "2"
    assert "the owner of this machine gives 4 GiB" in part.why_ended(-9, said_so=True)
    asked = machine.part_of(asking("asked", cores=1, memory_bytes=GIB))
    assert "this job asked for 1 GiB on each machine" in asked.why_ended(-9, said_so=True)
