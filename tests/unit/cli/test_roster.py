"""The warning of ``potluck nodes`` about a cluster with a single admin."""

from __future__ import annotations

import pytest

from potluck.cli.roster import _of_only_admin


def rows(*roles: str) -> list[dict[str, str]]:
    names = ("ada", "bob", "carl")
    return [
        {"name": name, "node": name * 16, "role": role}
        for name, role in zip(names, roles, strict=False)
    ]


@pytest.mark.parametrize("others", [("member",), ("member", "revoked"), ("revoked", "member")])
def test_a_single_admin_is_named_with_what_to_do(others: tuple[str, ...]) -> None:
    warning = _of_only_admin(rows("founder", *others))
    assert warning.startswith("Only ada can admit and ban machines.")
    assert "potluck admit NODE --admin" in warning


@pytest.mark.parametrize(
    "roles",
    [
        ("founder",),
        ("founder", "revoked"),
        ("founder", "ended"),
        ("founder", "admin", "member"),
        ("", ""),
    ],
)
def test_two_admins_a_lone_founder_and_an_open_cluster_are_not_warned(
    roles: tuple[str, ...],
) -> None:
    assert _of_only_admin(rows(*roles)) == ""
