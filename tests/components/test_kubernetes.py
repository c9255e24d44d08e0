"""``potluck launch kubernetes``: the published schemas take the manifests, and pods made of them
train. The pods are hosts in namespaces that have what a kubelet gives a container: its variables,
the Secret, names; and one that is lost is started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from potluck.cli.launch.manifests import Kind
from support.commands import Command
from support.components import environment
from support.hosts import Host, Network, missing
from support.managed import POTLUCK, Work, kill_all, on_host, write_names

PACKAGES = ("kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0")
NUM = 3

VALIDATE = """
import json, sys
import kubernetes_validate
from kubeflow_trainer_api import models

MODELS = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
for each in json.load(sys.stdin)["items"]:
    model = MODELS.get(each["kind"])
    if model is None:
        kubernetes_validate.validate(each, "1.32", strict=True)
    else:  # it drops what it does not know without a word
        found = json.loads(json.dumps(model.from_dict(each).to_dict()))
        assert found == each, (found, each)
    print(each["kind"])
"""


def manifest(folder: Path, kind: Kind, *options: str) -> dict[str, Any]:
    """What the command writes for ``train.py`` in ``folder``."""
    words = ["--print", f"--kind={kind}", "--image=digits:1", f"--nodes={NUM}", *options]
    command = [POTLUCK, "launch", "kubernetes", *words, "train.py", str(folder), "60", "kept"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def validated(python: Path, listed: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-W", "ignore", "-c", VALIDATE]
    text = json.dumps(listed)
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", Kind)
def test_the_published_schemas_take_the_manifest(kind: Kind, tmp_path: Path) -> None:
    python = environment("kubernetes", *PACKAGES)
    listed = manifest(tmp_path, kind, "--gpus=1")
    done = validated(python, listed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [each["kind"] for each in listed["items"]]


@pytest.mark.parametrize("kind", Kind)
def test_a_field_that_is_not_theirs_is_found(kind: Kind, tmp_path: Path) -> None:
    """Else the test above would say nothing."""
    python = environment("kubernetes", *PACKAGES)
    listed = manifest(tmp_path, kind)
    listed["items"][-1]["spec"]["replicaCount"] = 3
    assert validated(python, listed).returncode != 0


class Pods:
    """The pods of a manifest, on hosts of a network."""

    def __init__(self, folder: Path, network: Network, listed: dict[str, Any]) -> None:
        objects = {each["kind"]: each for each in listed["items"]}
        self._secret = objects["Secret"]["stringData"]["psk"]
        main = listed["items"][-1]
        self.name, spec = main["metadata"]["name"], main["spec"]
        self._first = f"{self.name}-node-0-"
        self._index = "JOB_COMPLETION_INDEX"
        if main["kind"] == "TrainJob":
            self._container = spec["trainer"]
        elif main["kind"] == "JobSet":
            [job] = spec["replicatedJobs"]
            self._container = job["template"]["spec"]["template"]["spec"]["containers"][0]
        else:
            self._container = spec["template"]["spec"]["containers"][0]
            self._first, self._index = f"{self.name}-", "POD_INDEX"
        self._folder = folder
        self._hosts: list[Host] = list(network)
        self._known = folder.parent / "hosts"
        names = {f"{self._first}{index}.{self.name}": host for index, host in enumerate(network)}
        write_names(self._known, names)

    def start(self, index: int) -> Command:
        variables = {self._index: str(index)}
        for each in self._container["env"]:
            if "value" in each:
                variables[each["name"]] = each["value"]
            elif "secretKeyRef" in each["valueFrom"]:
                variables[each["name"]] = self._secret
        command = [word.replace("$$", "$") for word in self._container["command"]]
        place = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = on_host(self._hosts[index], f"{self._first}{index}", self._known, command)
        return Command(words, cwd=self._folder, env=variables | {"PATH": place})

    def kill(self, index: int) -> None:
        kill_all(self._hosts[index])


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(reason)
    with Network(NUM) as network:
        yield network


@pytest.mark.parametrize("kind", Kind)
def test_pods_train_lose_one_take_it_back_and_end_well(
    kind: Kind, tmp_path: Path, network: Network
) -> None:
    work = Work(tmp_path / "work", lambda: running[0].text)
    pods = Pods(work.folder, network, manifest(work.folder, kind))
    with ExitStack() as stack:
        running = [stack.enter_context(pods.start(index)) for index in range(NUM)]
        step = work.wait_for_world(NUM)
        pods.kill(2)
        step = work.wait_for_world(NUM - 1, after=step.number)
        running[2] = stack.enter_context(pods.start(2))
        work.wait_for_world(NUM, after=step.number)
        work.hurry()
        if kind is Kind.STATEFULSET:  # its pods would be started again
            for each in running:
                each.wait_for("this pod waits to be deleted")
                each.signal(15)
        assert [each.finish() for each in running] == [0] * NUM
    work.check_result()


def test_with_pod_0_all_begin_again_from_the_checkpoint(tmp_path: Path, network: Network) -> None:
    work = Work(tmp_path / "work", lambda: running[0].text)
    pods = Pods(work.folder, network, manifest(work.folder, Kind.JOBSET))
    with ExitStack() as stack:
        running = [stack.enter_context(pods.start(index)) for index in range(NUM)]
        step = work.wait_for_world(NUM)
        work.wait_for_world(NUM, after=step.number)  # a checkpoint is written every 10 steps
        pods.kill(0)
        assert [each.finish() for each in running[1:]] == [1, 1]
        running = [stack.enter_context(pods.start(index)) for index in range(NUM)]
        work.wait_for_world(NUM)
        work.hurry()
        assert [each.finish() for each in running] == [0] * NUM
    work.check_result()
    assert "begins at step 0 " not in work.read()
