"""``potluck launch``: what becomes of words, and the files that it writes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck._core.cluster.launching import Invitation, own_addresses, parse_invitation
from potluck.cli.launch.command import split_words
from potluck.cli.launch.fleets import sbatch
from potluck.cli.main import app
from potluck.errors import ConfigurationError

HARD = ["it's", "two\nlines", 'a "b"', "$(touch gone)", "`x`", "a\\b", "", "--flag", "é*"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train it.py"
    path.write_text("print(1)\n")
    return path


def launched(*words: str) -> str:
    result = CliRunner().invoke(app, ["launch", *words])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["launch", *words])
    assert result.exit_code == 2
    return " ".join(result.output.split())


# ---------------------------------------------------------------- words


def test_words_before_the_script_are_the_launchers(script: Path) -> None:
    words = ["--nodes=3", "-C", script.name, "--nodes=4", "x"]
    assert split_words(words, "sbatch") == (["--nodes=3", "-C"], Path(script.name), words[3:])


def test_an_option_with_its_value_apart_is_no_script(script: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"one word each: --nodes=3 in place of --nodes 3"):
        split_words(["--nodes", "3", script.name], "sbatch")


def test_without_a_script_the_error_says_so() -> None:
    with pytest.raises(ConfigurationError, match="name a SCRIPT after the options of sbatch"):
        split_words(["--nodes=3"], "sbatch")


# ---------------------------------------------------------------- Slurm


def test_sbatch_is_given_its_options_and_the_command_in_the_allocation(script: Path) -> None:
    text = launched(
        "slurm", "--print", "--requeue", "--nodes=3", "--comment=a b", script.name, *HARD
    )
    words = shlex.split(text)
    assert words[0] == "sbatch"
    assert {"--nodes=3", "--no-kill", "--requeue", "--comment=a b"} <= set(words)
    assert words.index("--job-name=train it") < words.index("--nodes=3")  # the later one counts
    inner = shlex.split(words[-1].removeprefix("--wrap="))
    assert inner[0] == "exec"
    assert inner[inner.index("launch") :][:4] == ["launch", "slurm", "--workers=1", "--wait=60"]
    assert inner[-len(HARD) - 2 :] == ["--", str(script), *HARD]


def test_a_shell_gives_the_script_its_arguments_as_they_were() -> None:
    wrapped = sbatch([], ["printf", "%s\\0", *HARD], requeue=False)[-1].removeprefix("--wrap=")
    done = subprocess.run(["sh"], input=wrapped, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == HARD
    assert not Path("gone").exists()


def test_without_slurm_submitting_says_where_to_go(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no sbatch on this machine; call" in refused("slurm", script.name)


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "'3' is no script; options of sbatch are one word" in refused("slurm", "--nodes", "3")
    assert "the script 'x.py' does not exist" in refused("slurm", "--nodes=3", "x.py")


# ---------------------------------------------------------------- invitations


def test_an_invitation_is_one_line_and_does_not_show_its_secret() -> None:
    invitation = Invitation("ab" * 32, (("10.0.0.1", 52415),), "node")
    assert parse_invitation(invitation.line()) == invitation
    assert invitation.line().count(b"\n") == 1
    assert "abab" not in repr(invitation)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff",
        b"{}",
        b'{"psk": "abc", "peers": [["a", 1]]}',
        b'{"psk": "%s", "peers": []}' % (b"ab" * 32),
        b'{"psk": "%s", "peers": [["a", 70000]]}' % (b"ab" * 32),
    ],
)
def test_what_is_no_invitation_is_refused_and_not_shown(line: bytes) -> None:
    with pytest.raises(ConfigurationError, match="holds no invitation") as caught:
        parse_invitation(line)
    assert "abab" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_launcher_names_addresses_that_others_can_call() -> None:
    assert own_addresses()
    assert not any(each.startswith(("fe80", "127.")) for each in own_addresses()[1:])


# ---------------------------------------------------------------- Open MPI, Ray, Dask


def test_without_mpirun_the_error_names_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no program mpirun on this machine" in refused("mpi", script.name)


@pytest.mark.parametrize(
    ("words", "module"),
    [(["ray"], "ray"), (["dask", "--scheduler", "tcp://127.0.0.1:1"], "distributed")],
)
def test_without_its_package_the_error_says_how_to_install_it(
    script: Path, words: list[str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert f"pip install 'potluck[{words[0]}]'" in refused(*words, script.name)
