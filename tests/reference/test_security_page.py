"""SECURITY.md names a test for each line of its promises, and the metadata for reports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w./-]+\.py)::(test_\w+)`")


def promises() -> list[str]:
    text = PAGE.partition("\n## What is promised")[2].partition("\n## ")[0]
    return [line.partition("\n\n")[0] for line in re.split(r"^- ", text, flags=re.M)[1:]]


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[:40])
def test_each_promise_names_tests_that_are_there(promise: str) -> None:
    named = NAMED.findall(promise)
    assert named
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), (
            f"{path}::{name}"
        )


def test_the_page_has_promises_and_names_no_test_outside_them() -> None:
    assert len(promises()) > 10
    assert len(NAMED.findall(PAGE)) == sum(len(NAMED.findall(each)) for each in promises())


def test_reports_go_where_the_metadata_says() -> None:
    assert "that the package's metadata names as `Security`" in PAGE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = project.get("urls", {})
    assert not urls or "Security" in urls
