"""Code on pages: blocks that come from files are those of the files, and every block shows on a code host."""

from __future__ import annotations

import re
from pathlib import Path

import doc_blocks
import pytest

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


FILE = "import os\n\n\ndef one():\n    pass\n\n\ndef two():\n    pass\n"


@pytest.mark.parametrize(
    ("part", "block"),
    [
        ("", FILE.strip()),
        (' to "def one"', "import os"),
        (' from "def one" to "def two"', "def one():\n    pass"),
        (' from "def two"', "def two():\n    pass"),
    ],
)
@pytest.mark.parametrize("old", ["", "```python\nstale\n\n```\n", "````text\n```\n````\n"])
def test_a_block_is_written_or_replaced(tmp_path: Path, part: str, block: str, old: str) -> None:
    (tmp_path / "code.py").write_text(FILE)
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n<!-- code: code.py{part} -->\n{old}\nAfter `x`.\n")
    comment = f"<!-- code: code.py{part} -->"
    assert doc_blocks.refreshed(page) == f"Before.\n\n{comment}\n```python\n{block}\n```\n\nAfter `x`.\n"


def test_a_block_in_a_list_is_indented_and_a_file_with_fences_has_longer_ones(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text("a\n\n```\nb\n")
    page = tmp_path / "page.md"
    page.write_text("1. Do:\n\n   <!-- code: page.txt -->\n")
    again = "1. Do:\n\n   <!-- code: page.txt -->\n   ````text\n   a\n\n   ```\n   b\n   ````\n"
    assert doc_blocks.refreshed(page) == again
    page.write_text(again)
    assert doc_blocks.refreshed(page) == again


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("<!-- code: none.py -->", "page.md, none.py: "),
        ('<!-- code: code.py from "def three" -->', "no line has 'def three'"),
        ('<!-- code: code.py from "def two" to "def one" -->', "no line has 'def one'"),
        ("<!-- code: code.py form -->", "page.md: a comment is not <!-- code: FILE"),
    ],
)
def test_a_comment_that_names_nothing_is_an_error(tmp_path: Path, comment: str, message: str) -> None:
    (tmp_path / "code.py").write_text(FILE)
    page = tmp_path / "page.md"
    page.write_text(f"{comment}\n```python\n```\n")
    with pytest.raises(LookupError, match=re.escape(message)):
        doc_blocks.refreshed(page)
