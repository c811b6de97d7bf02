"""Code on pages: blocks that come from files are those of the files, and every block shows on a code host."""

from __future__ import annotations

import re

import doc_blocks

PAGES = doc_blocks.pages()
INVISIBLE = ("literalinclude", "eval-rst", "autoclass", "autofunction", "automodule", "code-cell", "glossary")
"""What only the site shows. A page that is one `{include}` of another one has nothing of its own."""


def test_the_blocks_of_pages_are_those_of_their_files_and_show_everywhere() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    stale = [page for page, text in texts.items() if text != doc_blocks.refreshed(page)]
    assert not stale, "run: python docs/tools/doc_blocks.py"
    assert sum(len(doc_blocks.blocks_of(page)) for page in PAGES) > 20
    unseen = re.compile(rf"^ *[`:]{{3,}}\{{({'|'.join(INVISIBLE)})\}}", re.M)
    assert not [page for page, text in texts.items() if unseen.search(text)]
