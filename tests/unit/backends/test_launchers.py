"""What each launcher's variables mean, as a table; and what is said of those that mean nothing."""

from __future__ import annotations

import re

import pytest

from potluck._core.backends.launchers import (
    LaunchedRank,
    RankRange,
    detect,
    is_half_described,
    ranks_of_command,
    read_launched_rank,
)
from potluck.errors import ConfigurationError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "4000",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_PORT": "4000",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_PORT": "4000",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu-[01-03,07],login",
    "MASTER_PORT": "4000",
}
POD = {
    # What the kubelet sets in every container, and what the pod's specification adds.
    "HOSTNAME": "ml-workers-3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "ml-workers-0.ml-workers",
    "MASTER_PORT": "4000",
}
STATEFUL_SET = POD | {"RANK": "ml-workers-3"}
INDEXED_JOB = POD | {"HOSTNAME": "train-3", "JOB_COMPLETION_INDEX": "3"}
POD_INDEX = POD | {"POD_INDEX": "3"}
IN_POD = LaunchedRank("kubernetes", 3, 4, 0, "ml-workers-0.ml-workers", 4000)


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            LaunchedRank("environment", 0, 1, 0, "127.0.0.1", 29500),
        ),
        (TORCHRUN, LaunchedRank("torchrun", 3, 4, 1, "10.0.0.7", 4000, True, 2)),
        (MPIRUN, LaunchedRank("mpirun", 1, 4, 1, "127.0.0.1", 4000)),
        (MPIRUN | {"MASTER_ADDR": "10.0.0.7"}, LaunchedRank("mpirun", 1, 4, 1, "10.0.0.7", 4000)),
        (MPICH, LaunchedRank("mpirun", 1, 2, 1, "127.0.0.1", 4000)),
        (SRUN, LaunchedRank("slurm", 5, 8, 1, "gpu-01", 4000)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "6"}, LaunchedRank("slurm", 5, 6, 1, "gpu-01", 4000)),
        (SRUN | {"SLURM_STEP_NODELIST": "one"}, LaunchedRank("slurm", 5, 8, 1, "one", 4000)),
        (SRUN | {"SLURM_STEP_ID": ""}, None),  # in the batch script itself: alone
        (MPIRUN | TORCHRUN, LaunchedRank("torchrun", 3, 4, 1, "10.0.0.7", 4000, True, 2)),
        (
            SRUN | MPIRUN,
            LaunchedRank("mpirun", 1, 4, 1, "127.0.0.1", 4000),
        ),  # mpirun in a Slurm job
        (STATEFUL_SET, IN_POD),
        (
            STATEFUL_SET | {"RANK": "a.b-2-0"},
            LaunchedRank("kubernetes", 0, 4, 0, IN_POD.host, 4000),
        ),
        (INDEXED_JOB, IN_POD),
        (POD_INDEX, IN_POD),
        (INDEXED_JOB | {"RANK": "1"}, LaunchedRank("environment", 1, 4, 0, IN_POD.host, 4000)),
        (INDEXED_JOB | {"POD_INDEX": "1"}, IN_POD),
        (INDEXED_JOB | TORCHRUN, LaunchedRank("torchrun", 3, 4, 1, "10.0.0.7", 4000, True, 2)),
        (
            INDEXED_JOB | MPIRUN,
            LaunchedRank("mpirun", 1, 4, 1, IN_POD.host, 4000),
        ),  # mpirun in a pod
        (
            {"RANK": "ml-0", "WORLD_SIZE": "1"},
            LaunchedRank("kubernetes", 0, 1, 0, "127.0.0.1", 29500),
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # independent tasks
    ],
)
def test_a_launchers_variables_give_a_rank(
    variables: dict[str, str], launched: LaunchedRank | None
) -> None:
    assert detect(variables) == launched


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4; ranks begin at 0"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not an integer from 1"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT='x' is not an integer from 1 to 65535"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is not below"),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "give all the address of rank 0: mpirun -x MASTER",
        ),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, "mpirun -genv MASTER_ADDR ADDRESS"),
        (SRUN | {"SLURM_NTASKS": ""}, "SLURM_NTASKS is not set; it must be an integer from 1"),
        (SRUN | {"SLURM_NODELIST": ""}, "names no host; set MASTER_ADDR"),
        *(
            (
                POD | {"RANK": name},
                f"RANK={name!r} is not an integer from 0 to 65535, nor the name of a StatefulSet's "
                "pod (ml-workers-3); in the pods of an Indexed Job leave RANK unset",
            )
            # A Deployment's pod, an Indexed Job's, a host counted from 01, and mistakes.
            for name in (
                "ml-7d9f8b6c5-x2k4j",
                "train-3-zxcvb",
                "node-01",
                "3.0",
                "-3",
                "ml--",
                "W-1",
            )
        ),
        (
            POD | {"RANK": "ml-workers-7"},
            "RANK=ml-workers-7 is not below WORLD_SIZE=4; ranks begin at 0",
        ),
        (POD | {"POD_INDEX": "three"}, "POD_INDEX='three' is not an integer from 0"),
        (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 is not below WORLD"),
        (STATEFUL_SET | {"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not an integer from 1"),
        (
            STATEFUL_SET | {"MASTER_ADDR": ""},
            "so set it to that of pod 0 (RANK='ml-workers-3', with a headless service: "
            "ml-workers-0.SERVICE)",
        ),
        (
            INDEXED_JOB | {"MASTER_ADDR": ""},
            "(JOB_COMPLETION_INDEX='3', with a headless service: P",
        ),
    ],
)
def test_a_variable_that_means_nothing_is_named(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        detect(variables)


def test_two_jobs_on_one_machine_meet_at_two_ports_and_all_ranks_of_one_at_the_same() -> None:
    def port(job: str, rank: int) -> int:
        variables = MPIRUN | {"MASTER_PORT": "", "OMPI_MCA_ess_base_jobid": job}
        launched = detect(variables | {"OMPI_COMM_WORLD_RANK": str(rank)})
        assert launched is not None
        return launched.port

    assert port("1", 0) == port("1", 3)
    assert port("1", 0) != port("2", 0)
    assert 15_000 <= port("1", 0) < 25_000


def test_without_a_launcher_the_variables_to_set_are_named() -> None:
    with pytest.raises(ConfigurationError, match="RANK is not set; RANK, WORLD_SIZE, MASTER_ADDR"):
        read_launched_rank({})
    for name in ("RANK", "JOB_COMPLETION_INDEX", "POD_INDEX"):
        with pytest.raises(ConfigurationError, match="WORLD_SIZE is not set"):
            read_launched_rank({name: "1"})


@pytest.mark.parametrize(
    ("variables", "is_half"),
    [
        ({}, False),
        (STATEFUL_SET, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"RANK": "0"}, False),
        ({"JOB_COMPLETION_INDEX": "3"}, False),
        ({"MASTER_ADDR": "10.0.0.7"}, False),
        ({"WORLD_SIZE": "4"}, True),
        (POD | {"POD_INDEX": ""}, True),  # Kubernetes before 1.28 does not know the label
        (INDEXED_JOB | {"WORLD_SIZE": ""}, True),
        (STATEFUL_SET | {"WORLD_SIZE": ""}, True),
    ],
)
def test_half_of_a_description_is_no_reason_to_train_alone(
    variables: dict[str, str], is_half: bool
) -> None:
    assert is_half_described(variables) is is_half
    if is_half:
        with pytest.raises(ConfigurationError, match=r"(RANK|WORLD_SIZE) is not set"):
            read_launched_rank(variables)


AXONML = {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(
    ("variables", "num", "ranks"),
    [
        (AXONML, 4, RankRange("environment", 4, 4, 8, 0, "10.0.0.7", 4000)),
        (AXONML | {"RANK": "0"}, 4, RankRange("environment", 0, 4, 8, 0, "10.0.0.7", 4000)),
        (AXONML | {"RANK": "7"}, 1, RankRange("environment", 7, 1, 8, 0, "10.0.0.7", 4000)),
        (TORCHRUN, 1, RankRange("torchrun", 3, 1, 4, 1, "10.0.0.7", 4000)),
        # mpirun, srun and pods count commands.
        (MPIRUN, 2, RankRange("mpirun", 2, 2, 8, 2, "127.0.0.1", 4000)),
        (MPICH, 3, RankRange("mpirun", 3, 3, 6, 3, "127.0.0.1", 4000)),
        (SRUN, 4, RankRange("slurm", 20, 4, 32, 4, "gpu-01", 4000)),
        (STATEFUL_SET, 2, RankRange("kubernetes", 6, 2, 8, 0, IN_POD.host, 4000)),
        (INDEXED_JOB, 2, RankRange("kubernetes", 6, 2, 8, 0, IN_POD.host, 4000)),
        # A world of this command alone.
        ({}, 4, None),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 4, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 4, None),
        ({"WORLD_SIZE": "4"}, 4, None),
        ({"MASTER_ADDR": "10.0.0.7"}, 4, None),
        ({"RANK": "3"}, 4, None),
        (SRUN | {"SLURM_STEP_ID": ""}, 4, None),
        (AXONML | {"POTLUCK_AGENT": "127.0.0.1:4001"}, 4, None),
    ],
)
def test_the_ranks_of_a_command_that_starts_several_workers(
    variables: dict[str, str], num: int, ranks: RankRange | None
) -> None:
    assert ranks_of_command(variables, num) == ranks


def test_the_variables_of_each_worker_of_a_command() -> None:
    ranks = ranks_of_command(AXONML, 4)
    assert ranks is not None
    found = [detect(ranks.variables(index)) for index in range(4)]
    assert found == [
        LaunchedRank("environment", 4 + index, 8, index, "10.0.0.7", 4000) for index in range(4)
    ]
    assert ranks.variables(1)["LOCAL_WORLD_SIZE"] == "4"


def test_local_ranks_go_on_where_those_of_another_command_on_the_machine_end() -> None:
    there = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    here = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    meeting = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}
    ranks = ranks_of_command(there | here | meeting, 2)
    assert ranks is not None
    found = [ranks.variables(index) for index in range(2)]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in found] == [("6", "2"), ("7", "3")]


@pytest.mark.parametrize(
    ("variables", "num", "words"),
    [
        (AXONML, 5, "RANK=4, WORLD_SIZE=8 and --workers 5 do not fit together"),
        (AXONML | {"WORLD_SIZE": "2", "RANK": "1"}, 4, "RANK=1, WORLD_SIZE=2 and --workers 4 do"),
        (AXONML | {"WORLD_SIZE": "4", "RANK": "1"}, 4, "for two machines of 4 workers set WORLD_S"),
        ({"WORLD_SIZE": "8"}, 4, "RANK is not set"),
        ({"RANK": "1", "MASTER_ADDR": "10.0.0.7"}, 4, "WORLD_SIZE is not set"),
        (AXONML | {"RANK": "x"}, 4, "RANK='x' is not an integer"),
    ],
)
def test_numbers_of_commands_that_do_not_fit_together(
    variables: dict[str, str], num: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"(?i){re.escape(words)}"):
        ranks_of_command(variables, num)


@pytest.mark.parametrize("prefix", ["MV2_COMM_WORLD", "HOROVOD"])
def test_mvapich_and_horovod(prefix: str) -> None:
    variables = {f"{prefix}_{name}": "2" for name in ("RANK", "LOCAL_RANK")}
    variables |= {f"{prefix}_{name}": "4" for name in ("SIZE", "LOCAL_SIZE")}
    assert detect(variables | {"MASTER_PORT": "4000"}) == LaunchedRank(
        "mpirun", 2, 4, 2, "127.0.0.1", 4000
    )
    with pytest.raises(ConfigurationError, match="give all the address of rank 0"):
        detect(variables | {f"{prefix}_LOCAL_SIZE": "2"})
