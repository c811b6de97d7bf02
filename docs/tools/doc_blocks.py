"""Put code from files into the fenced blocks of pages, which show on a code host as well as in the site.

A comment before a block names a file, relative to the page, and perhaps a part of it: from the first line
with one text, up to the line before the next one with another::

    <!-- code: ../examples/kvplug-sample/kvplug_sample/pipe.py from "class SamplePipe" to "# -- sending" -->

Usage: python docs/tools/doc_blocks.py. It writes each block, also one that is not there yet. A test fails if
a block differs from its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parents[2]
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".json": "json", ".md": "markdown", ".c": "c"}

_PART = r'(?: from "([^"\n]+)")?(?: to "([^"\n]+)")?'
_FENCED = r"\1(`{3,})[^`\n]*\n(.*?)^\1\5 *\n"
_COMMENT = re.compile(rf"^( *)<!-- code: (\S+){_PART} -->\n(?:{_FENCED})?", re.M | re.S)
_ANY_COMMENT = re.compile(r"^ *<!-- code:.*$", re.M)


@attrs.frozen
class Block:
    """One block of a page."""

    file: Path
    text: str
    """What the file has there."""


def pages() -> list[Path]:
    """Every page that a person wrote."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("plugins/*/*.md")]
    return sorted(path for path in found if "/." not in f"/{path.relative_to(ROOT)}")


def part_of(text: str, start: str | None, end: str | None) -> str:
    """The lines from the first one with ``start`` up to the one before the first one after it with ``end``.

    Raises:
        LookupError: there is no such line.
    """
    lines = text.splitlines(keepends=True)
    first = 0 if start is None else _line_with(lines, start, 0)
    last = len(lines) if end is None else _line_with(lines, end, first + 1)
    return "".join(lines[first:last])


def _line_with(lines: list[str], text: str, after: int) -> int:
    for number in range(after, len(lines)):
        if text in lines[number]:
            return number
    raise LookupError(f"no line has {text!r}")


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that have a file, in its order.

    Raises:
        LookupError: a file or a line is not there, or a comment has another form; says which.
    """
    return [_block(page, found) for found in _found(page)]


def _found(page: Path) -> Iterable[re.Match[str]]:
    text = page.read_text(encoding="utf-8")
    known = [*_COMMENT.finditer(text)]
    if len(known) != len(_ANY_COMMENT.findall(text)):
        raise LookupError(f'{page.name}: a comment is not <!-- code: FILE [from "TEXT"] [to "TEXT"] -->')
    return known


def _block(page: Path, found: re.Match[str]) -> Block:
    file = (page.parent / found[2]).resolve()
    try:
        return Block(file, part_of(file.read_text(encoding="utf-8"), found[3], found[4]))
    except (OSError, LookupError) as e:
        raise LookupError(f"{page.name}, {found[2]}: {e}") from e


def refreshed(page: Path) -> str:
    """The text of a page whose blocks are those of the files.

    Raises:
        LookupError: as ``blocks_of``.
    """

    def written(found: re.Match[str]) -> str:
        block = _block(page, found)
        comment = found[0].partition("\n")[0]
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block.text)), default=0))
        language = LANGUAGES.get(block.file.suffix, "text")
        lines = [f"{fence}{language}", *block.text.strip("\n").splitlines(), fence]
        return "\n".join([comment, *(f"{found[1]}{line}".rstrip() for line in lines)]) + "\n"

    _found(page)
    return _COMMENT.sub(written, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in pages():
        text = refreshed(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"refreshed {page.relative_to(ROOT)}")
