"""The laws by their ids: the page that is made of them, and a program that prints them."""

from __future__ import annotations

import re

import doc_laws
import pytest

from kvplug_testing.laws import main, selected


def test_the_page_is_what_is_made_of_the_laws() -> None:
    page = doc_laws.PAGE.read_text()
    assert doc_laws.refreshed(page) == page, "run: python docs/tools/doc_laws.py"


def test_a_law_is_named_by_its_id_and_several_by_their_kind() -> None:
    assert selected(["pipe-4", "end", "PIPE-4"]) == ("END-1", "END-2", "PIPE-4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lokup-3", "did you mean 'LOOKUP-3'?"),
        ("PIP", "did you mean 'PIPE'?"),
        ("xyz", "are ALL, END, PIPE"),
    ],
)
def test_the_error_for_an_unknown_law_names_a_similar_one(name: str, message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(["PIPE-5", name])


def test_the_program_prints_the_text_of_laws(capsys: pytest.CaptureFixture[str]) -> None:
    main(["PIPE-5"])
    assert capsys.readouterr().out.startswith("law PIPE-5 (receiving into memory):\n    `recv_tensor(")
