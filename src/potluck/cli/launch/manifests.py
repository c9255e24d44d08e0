"""Manifests of Kubernetes, and a Dockerfile. Pure: data in, data out.

Each pod runs `potluck launch pod`: pod 0 is the launcher and trains, too, the others are members
that know its name. The secret of the allocation is in a Secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from potluck.errors import ConfigurationError

Object = dict[str, Any]


class Kind(StrEnum):
    """What keeps the pods."""

    STATEFULSET = "statefulset"
    JOBSET = "jobset"
    TRAINJOB = "trainjob"


PORT = 52415
"""On which pod 0 listens."""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)
_RETRIES = 10


def pods(
    kind: Kind,
    *,
    name: str,
    image: str,
    num: int,
    command: Sequence[str],
    psk: str,
    gpus: int = 0,
) -> Object:
    """A list of all objects for ``num`` pods that run ``command``, in the form that kubectl takes.
    ConfigurationError for a name that Kubernetes does not take."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"--name {name}: up to 40 lower-case letters, digits and '-' are needed, a letter first"
        )
    checked_image(image)
    # Kubernetes replaces $(NAME) in commands, and $$ by $.
    words = [word.replace("$", "$$") for word in command]
    first = f"{name}-0" if kind is Kind.STATEFULSET else f"{name}-node-0-0"
    env: list[Object] = [
        {"name": "WORLD_SIZE", "value": str(num)},
        {"name": "MASTER_ADDR", "value": f"{first}.{name}"},
        {"name": "POTLUCK_PSK", "valueFrom": {"secretKeyRef": {"name": name, "key": "psk"}}},
    ]
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    container: Object = {"name": "node", "image": image, "command": words, "env": env}
    if limits:
        container["resources"] = limits
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {"psk": psk},
    }
    items = [secret]
    if kind is Kind.STATEFULSET:
        label = "metadata.labels['apps.kubernetes.io/pod-index']"
        env.append({"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": label}}})
        items += _stateful_set(name, num, container)
    elif kind is Kind.JOBSET:
        items.append(_job_set(name, num, container))
    else:
        trainer = {"image": image, "command": words, "env": env, "numNodes": num}
        if limits:
            trainer["resourcesPerNode"] = limits
        items.append(
            {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"name": name},
                "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
            }
        )
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _stateful_set(name: str, num: int, container: Object) -> list[Object]:
    labels = {"app": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "publishNotReadyAddresses": True,
            "ports": [{"name": "agent", "port": PORT}],
        },
    }
    # A StatefulSet starts a pod again that has ended, and so would train again.
    staying = container | {
        "command": [*container["command"][:3], "--stay", *container["command"][3:]]
    }
    spec = {
        "serviceName": name,
        "replicas": num,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [staying]}},
    }
    stateful = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}}
    return [service, {**stateful, "spec": spec}]


def _job_set(name: str, num: int, container: Object) -> Object:
    job = {
        "completions": num,
        "parallelism": num,
        "completionMode": "Indexed",
        "backoffLimit": _RETRIES * num,
        "template": {"spec": {"restartPolicy": "OnFailure", "containers": [container]}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def dockerfile(
    base: str, packages: Sequence[str], command: Sequence[str], *, has_requirements: bool
) -> str:
    """An image with the present folder in /app and potluck in an environment of its own.
    ConfigurationError if ``base`` is no name of an image."""
    checked_image(base)
    pip = ["/opt/potluck/bin/pip", "install", "--no-cache-dir"]
    wanted = [*packages, *(["-r", "requirements.txt"] if has_requirements else [])]
    steps = [
        f"FROM {base}",
        f"RUN {json.dumps(['python3', '-m', 'venv', '/opt/potluck'])}",
        "ENV PATH=/opt/potluck/bin:$PATH",
        "WORKDIR /app",
        'COPY [".", "/app/"]',
        f"RUN {json.dumps([*pip, *wanted])}",
        f"CMD {json.dumps(list(command))}",
    ]
    return "\n".join([*steps, ""])


IGNORED = "**/.*\n**/__pycache__\n"
"""What of the folder does not get into the image, as a .dockerignore says it."""


def checked_image(image: str) -> str:
    """``image``; ConfigurationError if it is no name of an image."""
    if not _IMAGE.fullmatch(image):
        raise ConfigurationError(f"{image!r} is no name of an image, such as python:3.12-slim")
    return image
