"""The page of versions says the versions of this checkout."""

from __future__ import annotations

import re
from pathlib import Path

from kvplug.net.trust import challenge
from kvplug.net.wire import frames
from kvplug.transport.hookspecs import PLUGIN_API
from kvplug.transport.store import format as page_format, header

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "versions.md"


def test_the_table_has_the_versions_of_the_code() -> None:
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", PAGE.read_text(encoding="utf-8"), re.M))
    assert rows["the plugin API"] == "{}.{}".format(*PLUGIN_API)
    assert rows["the wire format"] == f"{frames.MAJOR}.{frames.MINOR}"
    assert rows["the challenge that proves a secret"] == str(challenge.VERSION)
    assert rows["the format of pages in stores"] == str(header.VERSION) == str(page_format.VERSION)
