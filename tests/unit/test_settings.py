"""Where a setting comes from, and what is said when it is unusable."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from potluck._core.settings import About, Settings, load_settings
from potluck.errors import ConfigurationError

HEX = "0123456789abcdef" * 4


def test_the_defaults_are_those_of_the_design(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_HOME")
    settings = load_settings()
    assert settings == Settings()
    assert settings.home == Path.home() / ".potluck"
    assert (settings.gradient_port, settings.discovery_port) == (52416, 52415)
    assert (settings.peer_timeout_s, settings.connection_timeout_s) == (30.0, 5.0)
    assert (settings.min_peers, settings.max_retries, settings.bucket_size_mb) == (0, 3, 25.0)
    assert settings.max_early_bytes == 2 * 2**20


def test_the_environment_wins_over_defaults_and_arguments_over_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POTLUCK_GRADIENT_PORT", "6000")
    monkeypatch.setenv("POTLUCK_PEER_TIMEOUT_S", "1.5")
    monkeypatch.setenv("POTLUCK_USE_SHARED_MEMORY", "no")
    settings = load_settings(peer_timeout_s=2.5, max_retries=None)
    assert settings.gradient_port == 6000
    assert settings.peer_timeout_s == 2.5
    assert settings.use_shared_memory is False
    assert settings.max_retries == 3


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_MAX_RETRIES", "")
    assert load_settings().max_retries == 3


def test_a_home_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_HOME", "~/elsewhere")
    assert load_settings().home == Path.home() / "elsewhere"


def test_a_home_of_an_unknown_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_HOME", "~no-such-user/potluck")
    with pytest.raises(ConfigurationError, match="POTLUCK_HOME='~no-such-user/potluck'"):
        load_settings()
    with pytest.raises(ConfigurationError, match=r"^argument home='~nobody-here/potluck'"):
        load_settings(home="~nobody-here/potluck")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("POTLUCK_GRADIENT_PORT", "many", "valid integer"),
        ("POTLUCK_GRADIENT_PORT", "65536", "65535"),
        ("POTLUCK_GRADIENT_PORT", "-1", "0"),
        ("POTLUCK_PEER_TIMEOUT_S", "0", "greater than 0"),
        ("POTLUCK_PEER_TIMEOUT_S", "nan", "input should be"),
        ("POTLUCK_PEER_TIMEOUT_S", "inf", "less than"),
        ("POTLUCK_USE_SHARED_MEMORY", "perhaps", "valid boolean"),
        ("POTLUCK_SHARED_MEMORY_SLOT_BYTES", "5000", "multiple of 4096"),
        ("POTLUCK_LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_bad_value_is_named_with_its_variable_and_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    text = str(caught.value)
    assert f"{variable}={value!r}" in text
    assert expected in text


def test_several_bad_values_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_MIN_PEERS", "x")
    with pytest.raises(ConfigurationError, match=r"POTLUCK_MIN_PEERS='x'") as caught:
        load_settings(max_retries=-1)
    assert "argument max_retries=-1" in str(caught.value)


def test_an_argument_that_is_no_setting_is_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match="no setting 'colour'"):
        load_settings(colour="red")


def test_a_secret_is_in_no_error_and_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_PSK", HEX)
    assert HEX not in repr(load_settings())
    with pytest.raises(ConfigurationError) as caught:
        load_settings(passphrase=["correct horse"], min_peers=-1)
    assert "correct horse" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_two_secrets_at_once_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_PSK", HEX)
    monkeypatch.setenv("POTLUCK_PASSPHRASE", "correct horse battery")
    with pytest.raises(ConfigurationError, match="POTLUCK_PSK and POTLUCK_PASSPHRASE"):
        load_settings()


def test_the_page_of_settings_says_what_the_source_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    kinds = get_type_hints(Settings, include_extras=True)
    wanted = []
    for each in fields(Settings):
        (about,) = (word.text for word in kinds[each.name].__metadata__ if isinstance(word, About))
        default = "" if each.default is None else f"`{each.default}`" if each.default != "" else ""
        default = "`~/.potluck`" if each.name == "home" else default
        wanted.append(f"| `POTLUCK_{each.name.upper()}` | {default} | {about} |")
    assert [line for line in page.splitlines() if line.startswith("| `POTLUCK_")] == wanted


def test_settings_load_nothing_heavy() -> None:
    script = (
        "import sys, potluck._core.settings\n"
        "potluck._core.settings.load_settings()\n"
        "heavy = {'numpy', 'cryptography', 'asyncio', 'ssl', 'pydantic'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
