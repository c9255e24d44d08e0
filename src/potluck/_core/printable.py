"""Text of others, such as names, reasons and output, made safe for a terminal or a log. Pure.

A terminal obeys what it is shown: escape sequences clear the screen, move the cursor or write to
the clipboard, a carriage return or a control character of bidirectional text makes a line read as
another one. So these are shown as escapes (``\\x1b``, ``\\u202e``) wherever text goes to people.
"""

from __future__ import annotations

import re

MAX_NAME = 64
"""The most characters of the name of a machine or worker."""

_CONTROL = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""C0 but the tab, DEL, C1, line separators, and the controls of bidirectional text."""
_INVISIBLE = (
    r"\t\xad\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u180b-\u180f\u200b-\u200d\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
PRINTABLE = rf"^[^{_CONTROL}{_INVISIBLE}]*\Z"
"""The regular expression of names that are read off the wire."""

_CHARACTER = re.compile(f"[{_CONTROL}]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_RESET = "\x1b[0m"


def plain(text: str) -> str:
    """``text`` as one line."""
    return _CHARACTER.sub(_escape, text)


def paragraph(text: str) -> str:
    """``text`` with its line ends; later lines are indented, so that none looks like one of
    potluck's own."""
    first, *rest = text.split("\n")
    return "\n".join([plain(first), *(f"    {plain(line)}" if line else "" for line in rest)])


def lines_of(text: str) -> str:
    """``text`` with its line ends, which an error may have."""
    return "\n".join(map(plain, text.split("\n")))


def coloured(text: str) -> str:
    """One line of a program's output: its colours and styles (SGR) stay, and end with it."""
    parts, end = [], 0
    for found in _COLOUR.finditer(text):
        parts += [plain(text[end : found.start()]), found[0]]
        end = found.end()
    parts.append(plain(text[end:]))
    return "".join(parts) + (_RESET if end and parts[-2] != _RESET else "")


def name_of(text: str) -> str:
    """A name like ``text`` that may be sent: at most ``MAX_NAME`` characters, all printable."""
    return re.sub(f"[{_CONTROL}{_INVISIBLE}]", "?", text)[:MAX_NAME]


def json_text(text: str) -> str:
    """JSON with the same meaning, in which strings have no such characters. ``text`` is JSON, in
    which line ends stand between values only."""
    return _CHARACTER.sub(
        lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text
    )


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if found[0] in "\n\r":
        return "\\n" if found[0] == "\n" else "\\r"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"


def size_in_words(num_bytes: int) -> str:
    """``1.3 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(?:([KMGT])i?)?B?", re.IGNORECASE)


def bytes_in(text: str) -> int | None:
    """The bytes that ``text`` means: ``8GiB``, ``500M``, ``1.5 g``; units are powers of 1024. None
    if it means none, or more than any disk has."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    size = int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper()))
    return size if size < 1 << 60 else None
