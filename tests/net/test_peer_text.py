"""Text of peers: one printable line of bounded length, whatever they send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.net.peer_text import peer_text

ESCAPES = "\x1b]0;owned\x07\x1b[2J"


@given(st.text(max_size=300), st.integers(2, 150))
def test_any_text_becomes_one_printable_line(text: str, most: int) -> None:
    line = peer_text(text, most)
    assert len(line) <= most
    assert line.isprintable()
    assert len(line.splitlines()) <= 1


def test_escape_codes_and_directions_of_writing_are_replaced() -> None:
    assert "\x1b" not in peer_text(ESCAPES) and "\x07" not in peer_text(ESCAPES)
    assert peer_text("a\N{RIGHT-TO-LEFT OVERRIDE}b") == "a\N{REPLACEMENT CHARACTER}b"
    assert peer_text("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"


def test_lines_become_one_and_a_cut_is_visible() -> None:
    assert peer_text("two faults:\n  - a\n  - b") == "two faults: - a - b"
    assert peer_text("x" * 5000).endswith("x\N{HORIZONTAL ELLIPSIS}")
    assert peer_text(" " * 5000 + "x") == "\N{HORIZONTAL ELLIPSIS}"


@pytest.mark.parametrize("value", [None, 7, b"bytes", ["a"], {"a": 1}])
def test_a_value_that_is_not_text_is_named_by_its_type(value: Any) -> None:
    assert peer_text(value) == f"(a {type(value).__name__} instead of a text)"
