"""What travels with a script, and what stays, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from potluck._core.cluster.code_store.selection import Selection, Why

_MAX_SHOWN = 3

_COUNTED = {
    Why.HOME: ("of potluck's home", "of potluck's home"),
    Why.LINK: ("link", "links"),
    Why.SPECIAL: ("special file", "special files"),
    Why.IGNORED: ("ignored", "ignored"),
    Why.HIDDEN: ("hidden", "hidden"),
    Why.MADE_AGAIN: ("cache", "caches"),
}


def in_words(selection: Selection, machines: Sequence[str]) -> str:
    """``42 files, 1.3 MiB travel to 3 machines (ada, bob, carl)``, and how much stays."""
    num_files, num = len(selection.files), len(machines)
    files = f"{num_files} file{'s' * (num_files != 1)}, {size_in_words(selection.num_bytes)}"
    verb = "travels" if num_files == 1 else "travel"
    to = f"{num} machine{'s' * (num != 1)} ({_some(machines)})" if num else "machines that join"
    counts = {why: sum(each.why is why for each in selection.staying) for why in Why}
    stay = ", ".join(
        f"{count} {_COUNTED[why][count > 1]}" for why, count in counts.items() if count
    )
    return f"{files} {verb} to {to}" + (
        f"; not sent: {stay} (see potluck run --dry-run; --include names what is needed)"
        if stay
        else ""
    )


def links_in_words(selection: Selection) -> str:
    """A sentence about links that stay, which a script may miss; empty if there are none."""
    links = [each.path for each in selection.staying if each.why is Why.LINK]
    if not links:
        return ""
    return (
        f"links do not travel, so other machines don't have {_some(links)}: put the files "
        "themselves into the folder, or give the script a path that exists on every machine"
    )


def size_in_words(num_bytes: int) -> str:
    """``1.3 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def _some(names: Sequence[str]) -> str:
    left = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {left} more" if left > 0 else "")
