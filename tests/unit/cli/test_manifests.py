"""Manifests of Kubernetes and Dockerfiles: what is in them, and what becomes of hard words.
tests/components/test_kubernetes.py holds them against the published schemas."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from potluck._core.backends.launchers import read_launched_rank
from potluck.cli.launch.manifests import Kind, dockerfile, pods
from potluck.cli.main import app
from potluck.errors import ConfigurationError

HARD = ["it's", 'a "b"', "$(WORLD_SIZE)", "$$(x)", "a\nb", "a\\b", "", "--flag", "é*"]
KINDS = tuple(Kind)


def made(kind: Kind, **options: Any) -> dict[str, dict[str, Any]]:
    command = ["potluck", "launch", "pod", "--", "train.py", *HARD]
    given = {"name": "digits", "image": "registry.lan:5000/me/digits:1", "num": 3, "psk": "ab" * 32}
    listed = pods(kind, command=command, **(given | options))
    listed = json.loads(json.dumps(listed))
    return {each["kind"]: each for each in listed["items"]}


def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The container of a pod, or what stands for it in a TrainJob."""
    if "TrainJob" in objects:
        return objects["TrainJob"]["spec"]["trainer"]
    if "JobSet" in objects:
        job = objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        return job["template"]["spec"]["containers"][0]
    return objects["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]


def expanded(word: str) -> str:
    """What Kubernetes gives to the process, where no variable is defined."""
    return word.replace("$$", "$")


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_reach_the_script_as_they_were(kind: Kind) -> None:
    words = container(made(kind))["command"]
    assert [expanded(word) for word in words[-len(HARD) :]] == HARD
    assert all("$(" not in word.replace("$$", "") for word in words)


@pytest.mark.parametrize("kind", KINDS)
def test_the_secret_is_in_the_secret_alone(kind: Kind) -> None:
    objects = made(kind)
    assert objects.pop("Secret")["stringData"] == {"psk": "ab" * 32}
    assert "abab" not in json.dumps(objects)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_finds_its_number_and_pod_0(kind: Kind) -> None:
    index = "POD_INDEX" if kind is Kind.STATEFULSET else "JOB_COMPLETION_INDEX"
    objects = made(kind)
    variables = {each["name"]: each.get("value", "2") for each in container(objects)["env"]}
    launched = read_launched_rank(variables | {index: "2"})
    assert (launched.rank, launched.world_size) == (2, 3)
    first = "digits-0" if kind is Kind.STATEFULSET else "digits-node-0-0"
    assert launched.host == f"{first}.digits"
    if kind is Kind.STATEFULSET:
        assert objects["StatefulSet"]["spec"]["serviceName"] == "digits"
        assert objects["Service"]["spec"]["clusterIP"] == "None"
        assert "--stay" in container(objects)["command"]


@pytest.mark.parametrize("kind", KINDS)
def test_gpus_are_asked_for(kind: Kind) -> None:
    assert "nvidia.com/gpu" not in json.dumps(made(kind))
    assert '"nvidia.com/gpu": "2"' in json.dumps(made(kind, gpus=2))


@pytest.mark.parametrize("name", ["", "Digits", "a_b", "1a", "a-", "a" * 41, "a\nb", "a.b"])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="lower-case letters"):
        made(Kind.JOBSET, name=name)


@pytest.mark.parametrize("image", ["", "a b", "a\nRUN x", "-x", "$X"])
def test_an_image_that_is_no_name_is_refused(image: str) -> None:
    with pytest.raises(ConfigurationError, match="no name of an image"):
        made(Kind.JOBSET, image=image)
    with pytest.raises(ConfigurationError, match="no name of an image"):
        dockerfile(image, [], [], has_requirements=False)


def test_a_dockerfile_has_no_word_that_a_shell_reads() -> None:
    text = dockerfile("python:3.12-slim", ["potluck>=1"], ["potluck", *HARD], has_requirements=True)
    steps = dict(line.split(" ", 1) for line in text.splitlines() if line)
    assert steps["FROM"] == "python:3.12-slim"
    assert json.loads(steps["CMD"]) == ["potluck", *HARD]
    assert json.loads(steps["RUN"])[-3:] == ["potluck>=1", "-r", "requirements.txt"]
    assert all(line.split(" ", 1)[1].startswith("[") for line in text.splitlines() if "RUN" in line)


# ---------------------------------------------------------------- the commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path


def launch(*words: str) -> Any:
    return CliRunner().invoke(app, ["launch", *words])


def test_a_manifest_is_written_for_its_owner_alone(folder: Path) -> None:
    words = ("kubernetes", "--image", "digits:1", "--nodes", "3", "train.py", "--epochs", "3")
    assert launch(*words).exit_code == 0
    path = folder / "train.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [first] = [each for each in json.loads(path.read_text())["items"] if each["kind"] == "Secret"]
    result = launch(*words)
    assert result.exit_code == 2
    assert "train.json is there already" in result.output
    path.unlink()
    assert launch(*words).exit_code == 0
    assert first["stringData"] not in json.loads(path.read_text())["items"]


def test_a_manifest_on_stdout_is_json_alone(folder: Path) -> None:
    result = launch("kubernetes", "--print", "--kind", "trainjob", "--image", "d", "train.py")
    assert {each["kind"] for each in json.loads(result.output)["items"]} == {"Secret", "TrainJob"}


def test_a_dockerfile_of_somebody_else_stays(folder: Path) -> None:
    result = launch("docker", "train.py", "--epochs", "3")
    assert result.exit_code == 0, result.output
    assert 'CMD ["potluck", "run", "train.py", "--epochs", "3"]' in Path("Dockerfile").read_text()
    assert Path("Dockerfile.dockerignore").read_text().startswith("**/.*")
    Path("Dockerfile").write_text("FROM mine\n")
    assert "is there already" in launch("docker", "train.py").output
    assert Path("Dockerfile").read_text() == "FROM mine\n"
