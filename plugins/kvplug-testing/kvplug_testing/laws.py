"""The laws by id, which stand in laws.txt. Tests name the ids, and failures quote the laws.

``python -m kvplug_testing.laws PIPE-5 COMM`` prints this law and those of this kind; without an id, all of
them. The wheel has no page of the laws.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

from kvplug.kit import did_you_mean


@attrs.frozen
class Law:
    """One law."""

    id: str
    """``"PIPE-5"``: a kind and a number."""
    title: str
    text: str
    """The law itself, in Markdown, on one line."""
    section: str
    """The heading of its section."""

    @property
    def quoted(self) -> str:
        """Id and title, and the text below them."""
        lines = textwrap.wrap(self.text, 100, break_on_hyphens=False)
        return f"law {self}:\n" + "\n".join(f"    {line}" for line in lines)

    def __str__(self) -> str:
        return f"{self.id} ({self.title})"


def _read(written: str) -> dict[str, Law]:
    laws, section = {}, ""
    for paragraph in written.strip().split("\n\n"):
        if paragraph.startswith("## "):
            section = paragraph.removeprefix("## ")
        else:
            heading, text = paragraph.split("\n: ")
            id_, title = heading.split(", ", 1)
            laws[id_] = Law(id_, title, " ".join(text.split()), section)
    return laws


LAWS: Final = _read(Path(__file__).with_name("laws.txt").read_text("utf-8"))
"""The laws by id, in the order of the page."""


def selected(names: Iterable[str]) -> tuple[str, ...]:
    """The ids of the named laws, in the order of the page. A name is an id, or the kind of several laws
    (``"PIPE"``), in upper or lower case.

    Raises:
        LookupError: a name is neither; the message has the one that is most like it.
    """
    found: set[str] = set()
    for name in names:
        wanted = name.strip().upper()
        ids = {id_ for id_ in LAWS if wanted in (id_, _kind(id_))}
        if not ids:
            kinds = list(dict.fromkeys(map(_kind, LAWS)))
            hint = did_you_mean(wanted, [*kinds, *LAWS]) or f"; kinds of laws are {', '.join(kinds)}"
            raise LookupError(f"there is no law {name!r}{hint}")
        found |= ids
    return tuple(id_ for id_ in LAWS if id_ in found)


def _kind(id_: str) -> str:
    return id_.rpartition("-")[0]


def main(names: Iterable[str]) -> None:
    """The program.

    Raises:
        SystemExit: a name is unknown; the message names a similar one.
    """
    try:
        wanted = selected(names)
    except LookupError as e:
        sys.exit(str(e))
    sys.stdout.writelines(f"{LAWS[id_].quoted}\n" for id_ in wanted or LAWS)


if __name__ == "__main__":
    main(sys.argv[1:])
