"""Makes text from peers, plugins and files safe for messages, logs and terminals.

A peer may have proved its identity and still send newlines, terminal escape codes, or megabytes. Every
text from a peer passes :func:`peer_text` before it becomes part of a message; ``tests/architecture`` checks
this. Everything that a command prints passes :func:`printable`, because texts from plugins, files and models
reach terminals too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MAX_PEER_TEXT: Final = 1000
"""Number of characters kept by default."""
MAX_PEER_ITEMS: Final = 256
"""Number of elements of a list or mapping kept by default."""
_UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Replace every character that a terminal acts on, except line feeds and tabs.

    >>> printable("one\\r\\n\\tand \\x1b[31mtwo")
    'one \\n\\tand \N{REPLACEMENT CHARACTER}[31mtwo'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _in_place_of(c) for c in text)


def _in_place_of(character: str) -> str:
    return " " if character.isspace() else _UNPRINTABLE


def peer_text(text: object, most: int = MAX_PEER_TEXT, *, keep_lines: bool = False) -> str:
    """Return ``text`` as one printable line of at most ``most`` characters. A peer may have sent any type.

    ``keep_lines``: return the whole text instead, with its line feeds and tabs, for a command to print.

    >>> peer_text("no room\\n\\x1b[31mfor you")
    'no room \N{REPLACEMENT CHARACTER}[31mfor you'
    >>> peer_text(["no", "text"])
    '(a list instead of a text)'
    >>> peer_text("a" * 100, most=10)
    'aaaaaaaaa\N{HORIZONTAL ELLIPSIS}'
    """
    if not isinstance(text, str):
        return f"(a {type(text).__name__} instead of a text)"
    if keep_lines:
        return printable(text)
    line = printable(" ".join(text[: 2 * most].split()))
    if len(line) <= most and len(text) <= 2 * most:
        return line
    return line[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def peer_texts(plain: object, most: int = MAX_PEER_TEXT, items: int = MAX_PEER_ITEMS) -> Any:
    """Apply :func:`peer_text` to every text in a peer's plain values, and cut each list or mapping to
    ``items``.

    >>> peer_texts({"rooms": ["one\\n", 2]}, most=10)
    {'rooms': ['one', 2]}
    """
    match plain:
        case str():
            return peer_text(plain, most)
        case Mapping():
            shown = list(plain.items())[:items]
            return {peer_text(key, most): peer_texts(value, most, items) for key, value in shown}
        case list():
            return [peer_texts(each, most, items) for each in plain[:items]]
    return plain
