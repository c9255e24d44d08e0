"""Whose job it is, is not the leader's word."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.cluster.trust.credentials import is_by_starter, signed
from potluck._core.transport.credentials import node_id_of
from potluck._core.wire.jobs import JobSpec, Order

ADA, EVE = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def job_of(starter: Ed25519PrivateKey) -> JobSpec:
    return JobSpec(
        job="train-1",
        script="train.py",
        package=bytes(32),
        starter=node_id_of(starter.public_key()),
        versions=own_versions(),
        arguments=("--lr", "0.1"),
        started=1790000000.25,
        cluster=b"1" * 16,
        number=7,
    )


def test_a_job_stays_its_starters_on_its_way() -> None:
    spec = signed(job_of(ADA), ADA)
    order = msgspec.msgpack.decode(msgspec.msgpack.encode(Order(spec, ())), type=Order)
    assert order.spec == spec
    assert is_by_starter(order.spec)


def test_nobody_starts_a_job_in_anothers_name() -> None:
    assert not is_by_starter(job_of(ADA)), "without a signature"
    assert not is_by_starter(signed(job_of(ADA), EVE)), "with one's own"
    proof = signed(job_of(EVE), EVE).proof
    assert not is_by_starter(msgspec.structs.replace(job_of(ADA), proof=proof))


@pytest.mark.parametrize(
    "change",
    [
        {"package": None},
        {"package": b"\1" * 32},
        {"script": "/etc/other.py"},
        {"arguments": ("--lr", "9")},
        {"environment": (("LD_PRELOAD", "./evil.so"),)},
        {"job": "train-2"},
        {"starter": node_id_of(EVE.public_key())},
        {"cluster": b"2" * 16},
        {"number": 8},
        {"started": 1790000001.0},
    ],
)
def test_a_job_that_was_changed_on_its_way_is_not_its_starters(change: dict[str, object]) -> None:
    assert not is_by_starter(msgspec.structs.replace(signed(job_of(ADA), ADA), **change))
