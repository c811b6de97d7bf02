"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import kvplug

ROOT = Path(kvplug.__file__).parent
MODULES = [
    ".".join(("kvplug", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
NEEDS = {"kvplug.net.wire.checksum": "xxhash"}


@pytest.mark.parametrize("name", MODULES)
def test_its_examples_do_what_they_say(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert done.attempted
    assert not done.failed
