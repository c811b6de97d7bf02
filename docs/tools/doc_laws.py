"""Put the laws of the conformance kit into their page.

Usage: python docs/tools/doc_laws.py. It writes what follows the marker in docs/reference/laws.md. A test
fails if the page differs from the kit's laws.
"""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path
from typing import Final

from kvplug_testing.laws import LAWS

PAGE: Final = Path(__file__).parents[1] / "reference" / "laws.md"
_MARKER = "<!-- Laws, made of the kit's laws.txt: `python docs/tools/doc_laws.py`. -->\n"


def refreshed(page: str) -> str:
    """The page with the laws: sections of definition lists, each with a link target."""
    before, marker, _ = page.partition(_MARKER)
    wrap = textwrap.TextWrapper(118, initial_indent=": ", subsequent_indent="  ", break_on_hyphens=False)
    made = [before, marker]
    for section, laws in groupby(LAWS.values(), lambda law: law.section):
        made.append(f"\n## {section}\n")
        made += [f"\n({law.id})=\n{law.id}, {law.title}\n{wrap.fill(law.text)}\n" for law in laws]
    return "".join(made)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
