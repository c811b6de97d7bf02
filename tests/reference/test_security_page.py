"""SECURITY.md names a test for each line of its promises, and the metadata for reports."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w./-]+\.py)::(test_\w+)`")


def promises() -> list[str]:
    text = PAGE.partition("\n## What is promised")[2].partition("\n## ")[0]
    return [line.partition("\n\n")[0] for line in re.split(r"^- ", text, flags=re.M)[1:]]


def test_each_promise_names_tests_that_are_there_and_nothing_else_of_the_page_names_one() -> None:
    named = [NAMED.findall(promise) for promise in promises()]
    assert len(named) > 10 and all(named)
    assert len(NAMED.findall(PAGE)) == sum(map(len, named))
    missing = [
        f"{path}::{name}"
        for path, name in itertools.chain(*named)
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M)
    ]
    assert not missing


def test_reports_go_where_the_metadata_says() -> None:
    assert "that the package's metadata names as `Security`" in PAGE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = project.get("urls", {})
    assert not urls or "Security" in urls
