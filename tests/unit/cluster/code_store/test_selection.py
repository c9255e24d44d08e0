"""Which files of a script's folder travel, which stay and why, and which are refused."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from potluck._core.cluster.code_store import selection as selecting
from potluck._core.cluster.code_store.selection import (
    Selection,
    Why,
    check_script,
    in_words,
    links_in_words,
    select,
)
from potluck.errors import ConfigurationError

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n"


def write(root: Path, **texts: str) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(
        root,
        **{
            "train.py": "print('hello')",
            "lib/model.py": "W = 1",
            "lib/__pycache__/model.pyc": "cache",
            ".git/config": "secret url",
            ".env": "TOKEN=1",
            ".config/settings.toml": "lr = 1",
            ".config/.state": "",
            "venv/bin/python": "",
            "data/big.bin": "x" * 1000,
            "data/keep.csv": "1,2",
            "weights/a.pt": "w",
            "weights/best.pt": "w",
            "notes.tmp": "",
            "lib/.gitignore": "!local.pt\n",
            "lib/local.pt": "w",
            ".gitignore": "*.pt\n!best.pt\n",
            ".potluckignore": "# not these\n*.tmp\n/data/*.bin\n",
        },
    )
    os.symlink("/etc/passwd", root / "lib/link")
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "potluck-home"
    write(home, cluster_secret="ab" * 32, node_keypair=KEY, **{"code_store/objects/x": "x"})
    return home


def paths(selection: Selection) -> list[str]:
    return [file.path for file in selection.files]


def test_what_the_script_needs_travels_and_the_rest_stays_with_a_reason(
    folder: Path, home: Path
) -> None:
    found = select(folder, home)
    assert paths(found) == [
        *("data/keep.csv", "lib/local.pt", "lib/model.py", "train.py", "weights/best.pt"),
    ]
    assert {each.path: each.reason for each in found.staying} == {
        ".config/": "hidden",
        ".env": "hidden",
        ".git/": "hidden",
        ".gitignore": "hidden",
        ".potluckignore": "hidden",
        "data/big.bin": "ignored by the line '/data/*.bin' of .potluckignore",
        "lib/.gitignore": "hidden",
        "lib/__pycache__/": "a cache or an environment",
        "lib/link": "a link to /etc/passwd",
        "notes.tmp": "ignored by the line '*.tmp' of .potluckignore",
        "pipe": "no regular file",
        "venv/": "a cache or an environment",
        "weights/a.pt": "ignored by the line '*.pt' of .gitignore",
    }
    assert in_words(found, ["bob", "carl"]) == (
        f"5 files, {found.num_bytes} bytes travel to 2 machines (bob, carl); not sent: 1 link, "
        "1 special file, 3 ignored, 6 hidden, 2 caches (see potluck run --dry-run; --include names "
        "what is needed)"
    )
    assert "other machines don't have lib/link: put the files themselves" in links_in_words(found)


@pytest.mark.parametrize(
    ("include", "more"),
    [
        (".env", {".env"}),
        (".config/", {".config/settings.toml"}),
        (".config", {".config/settings.toml"}),
        (".config/.state", {".config/.state"}),
        ("./.config/*.toml", {".config/settings.toml"}),
        ("weights/a.pt", {"weights/a.pt"}),
        ("*.pt", {"weights/a.pt"}),
        ("venv/bin/", {"venv/bin/python"}),
        ("notes.tmp", {"notes.tmp"}),
        ("train.py", set()),
        ("lib/link", set()),
    ],
)
def test_what_is_named_travels_though_it_is_hidden_or_ignored(
    folder: Path, home: Path, include: str, more: set[str]
) -> None:
    before = set(paths(select(folder, home)))
    assert set(paths(select(folder, home, [include]))) - before == more


def test_a_negated_line_of_potluckignore_names_it_for_every_run(folder: Path, home: Path) -> None:
    (folder / ".potluckignore").write_text("*.tmp\n!.config/\n!weights/a.pt\n!.env\n")
    assert {".config/settings.toml", "weights/a.pt", ".env"} <= set(paths(select(folder, home)))


def test_gitignore_sends_nothing_hidden(folder: Path, home: Path) -> None:
    (folder / ".gitignore").write_text(".*\n!.env\n")
    assert ".env" not in paths(select(folder, home))


@pytest.mark.parametrize(
    ("include", "words"),
    [
        ("lala", r"--include 'lala' names nothing in .*/project: give a path below"),
        ("../elsewhere", "names nothing"),
        ("/etc/passwd", "names nothing"),
        ("!x", "--include '!x': name a file or folder below"),
        ("", "--include ''"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(
    folder: Path, home: Path, include: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        select(folder, home, [".env", include])


def test_the_jobs_data_stays_as_it_travels_by_itself(folder: Path, home: Path) -> None:
    before = paths(select(folder, home))
    write(folder, **{"pets/one.npy": "x", "pets/id_rsa": KEY})
    found = select(folder, home, ["lib/"], [str(folder / "pets"), str(folder), str(home)])
    assert paths(found) == before
    reasons = [each.reason for each in found.staying if each.path == "pets/"]
    assert reasons == ["a data set of the job, which comes by --data"]


# Keys and credentials.


@pytest.mark.parametrize("name", ["id_rsa", "certs/server.pem", "credentials.json", "deploy"])
def test_what_looks_like_a_key_is_refused_with_what_to_do(
    folder: Path, home: Path, name: str
) -> None:
    write(folder, **{name: KEY if name == "deploy" else "x"})
    with pytest.raises(ConfigurationError) as caught:
        select(folder, home)
    text = str(caught.value)
    assert text.startswith(f"{folder} would travel to the other machines with what looks like keys")
    assert f"{name} (" in text
    assert f"potluck run --include {name} ..." in text
    for wildcard in ("*", "*.pem", "certs/", "*e*", "[icd]*"):
        with pytest.raises(ConfigurationError, match=r"looks like keys|names nothing"):
            select(folder, home, [wildcard])
    assert name in paths(select(folder, home, [name]))
    (folder / ".potluckignore").write_text(f"/{name}\n")
    assert name not in paths(select(folder, home))
    (folder / ".potluckignore").write_text(f"!/{name}\n")
    assert name in paths(select(folder, home))


def test_a_folder_with_the_files_of_a_small_home_sends_none_of_its_secrets(
    tmp_path: Path, home: Path
) -> None:
    """The review's finding: a script beside these files took them all along."""
    folder = tmp_path / "server"
    secrets = (
        *(".ssh/id_ed25519", ".aws/credentials", ".env.local", ".netrc", ".npmrc", ".pypirc"),
        *(".kube/config", ".docker/config.json", ".gnupg/secring.gpg", ".bash_history"),
        *(".config/gcloud/credentials.db", ".cache/huggingface/token", ".envrc", ".ENV"),
    )
    write(folder, **dict.fromkeys(secrets, "secret"), **{"train.py": ""})
    assert paths(select(folder, home)) == ["train.py"]
    write(folder, id_rsa="x", **{"tls.pem": "x", "cluster_secret.1234.old": "x"})
    with pytest.raises(ConfigurationError, match=r"cluster_secret.*id_rsa.*tls\.pem"):
        select(folder, home)


# The potluck home.


def test_nothing_of_the_potluck_home_travels_by_whatever_path(folder: Path) -> None:
    home = folder / "state"  # a home that no name gives away
    write(home, cluster_secret="ab" * 32, node_keypair=KEY, **{"logs/job": "x"})
    os.link(home / "node_keypair", folder / "lib" / "harmless.txt")
    os.symlink(home, folder / "linked")
    os.symlink(home / "cluster_secret", folder / "linked.txt")
    (folder / ".env").unlink()
    for include in ((), ("state/", "harmless.txt", "linked", "linked.txt"), ("*",)):
        found = select(folder, home, include)
        assert not [path for path in paths(found) if path.startswith(("state", "linked"))]
        assert "lib/harmless.txt" not in paths(found)
        at_home = [each.path for each in found.staying if each.why is Why.HOME]
        assert at_home == ["lib/harmless.txt", "linked", "linked.txt", "state/"]


def test_a_home_that_is_a_link_is_the_same_home(folder: Path, tmp_path: Path) -> None:
    write(folder / "state", cluster_secret="ab" * 32)
    linked = tmp_path / "elsewhere"
    os.symlink(folder / "state", linked)
    assert not any(path.startswith("state") for path in paths(select(folder, linked)))
    for inside in (linked, linked / "code_store", folder / "state"):
        inside.mkdir(exist_ok=True)
        with pytest.raises(ConfigurationError, match="belongs to potluck's home"):
            select(inside, linked)


# Folders.


def test_a_home_folder_and_what_is_above_it_are_none_to_send(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "users" / "ada"
    (user / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(user))
    link = tmp_path / "short"
    os.symlink(user, link)
    for folder, words in (
        (user, "your home folder"),
        (link, "your home folder"),
        (user.parent, "a folder above your home folder"),
        (Path("/"), "a folder above your home folder"),
        (Path("/dev/shm"), "which all users and programs share"),
        (Path("/var/tmp"), "which all users and programs share"),
        (Path("/var"), "which all users and programs share"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"{words}: everything .* its own.* --root DIR"
        ):
            select(folder, home)
    assert select(user / "project", home) == Selection((), ())


# As git does.


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "-c", "core.excludesFile=", *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git says what it ignores")
@pytest.mark.parametrize("case", range(30))
def test_the_same_files_are_ignored_as_by_git(
    tmp_path: Path, home: Path, case: int, seed: int
) -> None:
    """Random trees with .gitignore files at all depths, seen from the root and from a folder."""
    rng = random.Random(seed + case)
    names = ["a", "b", "data", "x.pt", "y.pt", "z.txt", "build"]
    lines = [
        *("*.pt", "!x.pt", "data/", "/data", "data", "build/*", "!build/a", "**/b", "a/**", "b/*"),
        *("!data/", "a/b", "/a/*.pt", "*", "!*/", "!*.txt", "[xy].pt", r"\!a", "# a", "", "a/b/"),
        *("!a/b/z.txt", "**/data/**", "z*", "?.txt", "/b/", "x.pt "),
    ]
    repository = tmp_path / "repository"

    def grow(folder: Path, depth: int) -> None:
        folder.mkdir()
        for name in rng.sample(names, 5):
            if depth < 3 and "." not in name and rng.random() < 0.7:
                grow(folder / name, depth + 1)
            else:
                (folder / name).write_text("")
        if rng.random() < 0.6:
            (folder / ".gitignore").write_text("\n".join(rng.sample(lines, rng.randint(1, 4))))

    grow(repository, 0)
    git(repository, "init", "-q")
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "exclude").write_text(rng.choice(["", "y.pt\n", "/b\n"]))
    listed = git(repository, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    seen = {path for path in listed if path and not path.endswith(".gitignore")}
    assert set(paths(select(repository, home))) == seen
    folders = [path for path in repository.rglob("*") if path.is_dir()]
    for inner in [path for path in folders if ".git" not in path.parts]:
        below = inner.relative_to(repository).as_posix()
        is_ignored = subprocess.run(["git", "-C", repository, "check-ignore", "-q", below])
        if is_ignored.returncode:  # else it was named, by running a script there
            expected = {path for path in seen if path.startswith(f"{below}/")}
            assert {f"{below}/{path}" for path in paths(select(inner, home))} == expected


def test_without_a_repository_gitignore_counts_all_the_same(tmp_path: Path, home: Path) -> None:
    write(tmp_path / "p", **{".gitignore": "out/\n", "out/x": "", "lib/out/y": "", "train.py": ""})
    write(tmp_path, **{".gitignore": "*.py\n"})  # of no repository: nobody asked for it
    assert paths(select(tmp_path / "p", home)) == ["train.py"]


def test_a_script_in_a_folder_that_the_repository_ignores_travels(
    tmp_path: Path, home: Path
) -> None:
    write(tmp_path / "r", **{".gitignore": "scratch/\n", "scratch/train.py": "", ".git/HEAD": ""})
    assert paths(select(tmp_path / "r" / "scratch", home)) == ["train.py"]


# The script itself, sizes and files that can't be read.


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("lib/link", "it is a link, and links do not travel. .* potluck run /etc/passwd"),
        ("notes.tmp", r"'\*\.tmp' of \.potluckignore\. .* potluck run --include notes\.tmp "),
        ("weights/a.pt", r"'\*\.pt' of \.gitignore\. .* --include weights/a\.pt"),
        (".env", r"\.env stays here, because it is hidden\. .* potluck run --include \.env"),
        (".config/settings.toml", r"because it is hidden\. .* --include \.config/ "),
        ("lib/__pycache__/model.pyc", "it is a cache or an environment"),
        ("pipe", "it is no regular file"),
        ("../elsewhere.py", "it is not a file of its folder"),
    ],
)
def test_a_script_that_would_stay_behind_is_refused_with_what_keeps_it(
    folder: Path, home: Path, script: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        check_script(folder, script, select(folder, home))
    assert str(caught.value).startswith(f"the script {folder / script} can't travel")


@pytest.mark.parametrize("script", ["train.py", "lib/model.py"])
def test_a_script_that_travels_is_none_to_refuse(folder: Path, home: Path, script: str) -> None:
    check_script(folder, script, select(folder, home))


def test_a_folder_that_is_too_large_names_what_makes_it_so(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selecting, "MAX_CODE_BYTES", 20)
    with pytest.raises(ConfigurationError, match=r"The largest: .*train\.py.* --root DIR names"):
        select(folder, home)
    monkeypatch.setattr(selecting, "MAX_FILES", 3)
    with pytest.raises(ConfigurationError, match=r"more than 3 files.* --root DIR names"):
        select(folder, home)


def test_what_cannot_be_read_is_named(folder: Path, home: Path) -> None:
    """Root may read everything that is there, so here it is not there any more."""
    with pytest.raises(ConfigurationError, match=r"lib2 can't be read.*No such.*\.potluckignore"):
        select(folder / "lib2", home)
