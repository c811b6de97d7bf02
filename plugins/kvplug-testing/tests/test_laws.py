"""The laws by their ids: the page that is made of them, and a program that prints them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvplug_testing.laws import with_laws

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "laws.md"


def test_the_page_is_what_is_made_of_the_laws() -> None:
    page = PAGE.read_text()
    assert with_laws(page) == page, "run: python -m kvplug_testing.laws --page docs/reference/laws.md"


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
