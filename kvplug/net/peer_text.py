"""Text that comes from a peer, made fit for messages and logs.

A peer may have proved its identity and still send newlines, escape codes of terminals, or megabytes. Every
text of a peer passes :func:`peer_text` before it becomes a part of a message; ``tests/architecture`` checks
it.
"""

from __future__ import annotations

from typing import Final

MAX_PEER_TEXT: Final = 1000
"""Characters that are kept by default."""
_UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"


def peer_text(text: object, most: int = MAX_PEER_TEXT) -> str:
    """One printable line of at most ``most`` characters; a peer may have sent anything in place of a text.

    >>> peer_text("no room\\n\\x1b[31mfor you")
    'no room \N{REPLACEMENT CHARACTER}[31mfor you'
    >>> peer_text(["no", "text"])
    '(a list instead of a text)'
    >>> peer_text("a" * 100, most=10)
    'aaaaaaaaa\N{HORIZONTAL ELLIPSIS}'
    """
    if not isinstance(text, str):
        return f"(a {type(text).__name__} instead of a text)"
    line = " ".join(text[: 2 * most].split())
    line = "".join(c if c.isprintable() else _UNPRINTABLE for c in line)
    if len(line) <= most and len(text) <= 2 * most:
        return line
    return line[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
