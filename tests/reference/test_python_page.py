"""The page of Python describes what the tutorial's transport is made of."""

from __future__ import annotations

import ast
from pathlib import Path

import kvplug.errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "python.md"
DOORS = ("kvplug", "kvplug.transport")
SAMPLE = ROOT / "docs" / "examples" / "kvplug-sample" / "kvplug_sample" / "pipe.py"


def parts() -> set[str]:
    """What the tutorial's transport imports from kvplug, but for errors, which have a page of their own."""
    tree = ast.parse(SAMPLE.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module in DOORS]
    return {each.name for node in imports for each in node.names} - {*vars(kvplug.errors)}


def test_every_part_of_the_tutorials_transport_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = parts()
    assert {"DuplexPipe", "SendWindow", "watch_peer"} <= found
    assert not {name for name in found if f".{name}\n" not in text and f"| `{name}` |" not in text}


def test_every_part_that_pipes_share_is_described() -> None:
    stub = (ROOT / "kvplug" / "transport" / "__init__.pyi").read_text(encoding="utf-8")
    shared = {
        each.name
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvplug.transport.duplex.")
        for each in node.names
    }
    text = PAGE.read_text(encoding="utf-8")
    assert "DuplexPipe" in shared
    assert not {name for name in shared if f"| `{name}` |" not in text}
