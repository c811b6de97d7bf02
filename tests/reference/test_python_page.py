"""The page of Python describes what the tutorial's transport is made of."""

from __future__ import annotations

import ast
import re
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


def shown_from(package: str) -> set[str]:
    """What the door of transports shows from the modules of a package."""
    stub = (ROOT / "kvplug" / "transport" / "__init__.pyi").read_text(encoding="utf-8")
    return {
        each.name
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{package}.")
        for each in node.names
    }


def test_every_part_that_pipes_share_is_described() -> None:
    shared, text = shown_from("kvplug.transport.duplex"), PAGE.read_text(encoding="utf-8")
    assert "DuplexPipe" in shared
    assert not {name for name in shared if f"| `{name}` |" not in text}


def test_every_name_of_stores_is_described() -> None:
    named = {
        name
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    names = shown_from("kvplug.transport.store")
    assert {"BlockingStore", "PagesStored", "chains_of"} <= names
    assert not names - named
