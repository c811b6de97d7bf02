"""No message refers to a page of the repository: a user who installed a wheel does not have it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("kvplug", "plugins", "docs/examples")
ITS_OWN = {"plugins/kvplug-testing/kvplug_testing/laws.py"}
"""What writes a page of the repository."""


def pages(source: str) -> Iterator[str]:
    """The strings of a module, but docstrings, that name a page."""
    tree = ast.parse(source)
    said = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in said and _names_a_page(text):
                yield f"line {node.lineno}: {text[:80]}"


def _names_a_page(text: str) -> bool:
    return "docs/" in text or any(
        word.rstrip(".,;:)`").endswith(".md") for word in text.split() if "/" in word
    )


def shipped() -> Iterator[Path]:
    for tree in TREES:
        yield from (path for path in (ROOT / tree).rglob("*.py") if "tests" not in path.parts)
    yield from (ROOT / "kvplug").rglob("*.jinja")


def test_no_message_and_no_template_refers_to_a_page_of_the_repository() -> None:
    found = []
    for path in shipped():
        name = str(path.relative_to(ROOT))
        if name not in ITS_OWN:
            text = path.read_text()
            of_it = pages(text) if path.suffix == ".py" else [text] if _names_a_page(text) else []
            found += [f"{name}, {each}" for each in of_it]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('raise ValueError(f"it is refused; see docs/how-to/refusals.md#{name}")', 1),
        ("say('see how-to/refusals.md.')", 1),
        ('"""Written down in docs/reference/wire.md."""', 0),
        ("name.endswith('.md')", 0),
    ],
)
def test_such_messages_are_found(source: str, count: int) -> None:
    assert len(list(pages(source))) == count
