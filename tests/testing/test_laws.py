"""The laws by their ids: the page's own words, and a program that prints them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvplug.testing.laws import LAWS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "laws.md"


def test_what_a_law_says_is_what_its_page_says() -> None:
    written = re.findall(r"^\(([A-Z]+-\d+)\)=\n.+\n: ((?:.+\n)+)", PAGE.read_text(), re.MULTILINE)
    said = {id_: " ".join(text.split()) for id_, text in written}
    assert said == {law.id: law.text for law in LAWS.values()}


@pytest.mark.parametrize("ids", [[], ["PIPE-5", "LOOKUP-3"]], ids=["all", "some"])
def test_laws_are_printed_without_the_page(ids: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplug.testing.laws", *ids],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "".join(f"{LAWS[id_].quoted}\n" for id_ in ids or LAWS)
    assert " ".join(LAWS["LOOKUP-3"].text.split()) in " ".join(done.stdout.split())


def test_an_id_that_is_no_laws_is_told_with_those_that_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplug.testing.laws", "PIPE-5", "PIPE-55"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("no law: PIPE-55; these are: ALL-1, ")
