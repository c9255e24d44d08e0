"""Plans of environments: parts for kinds of machines, and what of another machine's plan counts."""

from __future__ import annotations

import msgspec
import pytest

from potluck._core.cluster.environments.kinds import in_words, own_kind, platform_of
from potluck._core.cluster.environments.plan import (
    Part,
    Plan,
    Wheel,
    decode_plan,
    environment_key,
    is_known_host,
    objection_to_url,
)
from potluck.errors import ConfigurationError, ProtocolError

CPU = {"UV_TORCH_BACKEND": "cpu"}
LINUX, ARM = "x86_64-manylinux_2_36", "aarch64-manylinux_2_36"


def wheel(name: str = "foo", digest: bytes = b"1" * 32) -> Wheel:
    file = f"{name}-1.0-py3-none-any.whl"
    return Wheel(name, "1.0", file, digest, 10, f"https://example.org/{file}")


def plan_of(*parts: Part) -> Plan:
    return Plan(python="3.11", source="uv.lock", parts=parts)


def test_a_machine_takes_the_part_of_its_kind() -> None:
    error = "foo 1.0 has no wheel for linux aarch64 (only win_amd64)"
    plan = decode_plan(plan_of(Part(LINUX, (wheel(),)), Part(ARM, error=error)).encode())
    assert plan.part(LINUX).wheels == (wheel(),)
    with pytest.raises(ConfigurationError, match=r"foo 1\.0 has no wheel for linux aarch64"):
        plan.part(ARM)
    with pytest.raises(ConfigurationError, match=r"is macOS 14\.5 aarch64: .* start it again"):
        plan.part("aarch64-apple-darwin-14.5")


def test_equal_wheels_make_one_environment_whatever_the_lock() -> None:
    one, two = wheel("foo", b"1" * 32), wheel("bar", b"2" * 32)
    key = environment_key(Part(LINUX, (one, two)), "3.11.7", b"own")
    assert key == environment_key(Part(LINUX, (two, one)), "3.11.7", b"own")
    others = {
        environment_key(Part(LINUX, (one,)), "3.11.7", b"own"),
        environment_key(Part(ARM, (one, two)), "3.11.7", b"own"),
        environment_key(Part(LINUX, (one, two)), "3.11.8", b"own"),
        environment_key(Part(LINUX, (one, two)), "3.11.7", b"newer"),
    }
    assert len(others - {key}) == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"file": "../../bin/sh.whl"},
        {"file": "foo.zip"},
        {"name": "foo\n--index-url http://evil"},
        {"version": "1.0 --hash"},
        {"size": 0},
        {"size": 1 << 50},
        {"sha256": b"short"},
    ],
)
def test_a_plan_with_a_bad_wheel_is_no_plan(changed: dict[str, object]) -> None:
    bad = msgspec.structs.replace(wheel(), **changed)
    with pytest.raises(ProtocolError, match="not a plan of an environment"):
        decode_plan(plan_of(Part(LINUX, (bad,))).encode())


def test_two_files_of_one_name_are_no_plan() -> None:
    twice = Part(LINUX, (wheel(), wheel(digest=b"2" * 32)))
    with pytest.raises(ProtocolError, match="two wheels of one name"):
        decode_plan(plan_of(twice).encode())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://files.pythonhosted.org/a.whl", ""),
        ("http://93.184.216.34/a.whl", ""),
        ("file:///etc/passwd", "only http and https"),
        ("ftp://example.org/a.whl", "only http and https"),
        ("https:///a.whl", "only http and https"),
        ("https://ada:secret@example.org/a.whl", "credentials do not travel"),
        ("http://127.0.0.1/a.whl", "not a public address"),
        ("http://localhost:8080/a.whl", "not a public address"),
        ("http://router.local/a.whl", "not a public address"),
        ("http://10.0.0.5:3141/a.whl", ""),  # the index that the owner named
        ("http://10.0.0.5:22/a.whl", "not a public address"),
        ("http://10.0.0.6:3141/a.whl", "not a public address"),
        ("http://169.254.169.254/latest/meta-data", "not a public address"),
        ("http://[::1]/a.whl", "not a public address"),
        ("http://[fe80::1%eth0]/a.whl", "not a public address"),
        ("http://[", "it is no URL"),
    ],
)
def test_where_a_plan_may_send_a_machine(url: str, said: str) -> None:
    objection = objection_to_url(url, own="http://10.0.0.5:3141/simple")
    assert said in objection
    assert bool(objection) == bool(said)
    assert "secret" not in objection


def test_kinds_of_machines_are_platforms_of_uv() -> None:
    assert platform_of("x86_64-manylinux_2_36") == ("x86_64-manylinux_2_36", CPU)
    assert platform_of("aarch64-manylinux_2_30") == ("aarch64-manylinux_2_28", CPU)
    assert platform_of("x86_64-manylinux_2_99") == ("x86_64-manylinux_2_40", CPU)
    assert platform_of("x86_64-manylinux_2_12") is None
    assert platform_of("x86_64-unknown-linux-musl") == ("x86_64-unknown-linux-musl", CPU)
    darwin = {"MACOSX_DEPLOYMENT_TARGET": "14.5"}
    assert platform_of("aarch64-apple-darwin-14.5") == ("aarch64-apple-darwin", darwin)
    for odd in ("", "--index-url", "x86_64-manylinux_2_36\n", "x86_64-hurd"):
        assert platform_of(odd) is None
    assert platform_of(own_kind()) is not None
    assert in_words("aarch64-manylinux_2_28") == "linux aarch64"
    assert in_words("") == "an unknown system"


def test_everybodys_indexes_are_known_by_name_over_tls_only() -> None:
    assert is_known_host("https://files.pythonhosted.org/packages/a/b.whl")
    assert is_known_host("https://download-r2.pytorch.org/whl/cpu/torch.whl")
    for other in (
        "http://files.pythonhosted.org/packages/a/b.whl",
        "https://files.pythonhosted.org.example.com/b.whl",
        "https://download-r2.pytorch.org.evil.example/b.whl",
        "https://user@evil.example/pypi.org/b.whl",
    ):
        assert not is_known_host(other), other
