"""The laws by their ids: the page that is made of them, and a program that prints them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvplug_testing.laws import LAWS, main, with_laws

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "laws.md"


def test_the_page_is_what_is_made_of_the_laws() -> None:
    page = PAGE.read_text()
    assert with_laws(page) == page, "run: python -m kvplug_testing.laws --page docs/reference/laws.md"


def test_the_page_is_made_anew_and_keeps_what_stands_around_the_laws(tmp_path: Path) -> None:
    stale = tmp_path / "laws.md"
    stale.write_text(PAGE.read_text().replace("(PIPE-5)=\n", "").replace(LAWS["END-1"].title, "three verbs"))
    assert "three verbs" in stale.read_text()
    main(["--page", str(stale)])
    assert stale.read_text() == PAGE.read_text()


def test_a_page_without_a_place_for_laws_is_refused() -> None:
    with pytest.raises(ValueError, match="which this page lacks"):
        with_laws("# Another page\n")


@pytest.mark.parametrize("ids", [[], ["PIPE-5", "LOOKUP-3"]], ids=["all", "some"])
def test_laws_are_printed_without_the_page(ids: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplug_testing.laws", *ids],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "".join(f"{LAWS[id_].quoted}\n" for id_ in ids or LAWS)
    assert " ".join(LAWS["LOOKUP-3"].text.split()) in " ".join(done.stdout.split())


def test_an_id_that_is_no_laws_is_told_with_those_that_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplug_testing.laws", "PIPE-5", "PIPE-55"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("there is no law 'PIPE-55'; did you mean PIPE-5, ")
