"""The glossary has the words that the pages use, each once, in their order, in two sentences at most."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "glossary.md"
ROW = re.compile(r"^\| \[([^]]+)\]\(\S+\) \| (.+?) \| (.*?) ?\|$", re.M)
WORDS = """
block, block size, capability, communicator, connector, contract, cost, decode, directory, door,
engine id, epoch, fingerprint, generation, group, handshake, hit, kit, law, layer, lease, level,
lookup buffer, miss, mutant, offer, page, pipe, prefill, producer, queue, rank, sink, store,
transport, variant
"""


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_every_row_has_a_term_with_a_link_in_the_order_of_the_alphabet() -> None:
    terms = [term for term, *_ in rows()]
    assert len(terms) == len(re.findall(r"^\| ", PAGE.read_text(encoding="utf-8"), re.M)) - 2
    assert terms == sorted(set(terms))


def test_the_words_of_the_pages_are_there() -> None:
    terms = {each for term, *_ in rows() for each in term.split(", ")}
    assert not {" ".join(word.split()) for word in WORDS.split(",")} - terms


def test_a_meaning_has_two_sentences_at_most() -> None:
    assert not [term for term, meaning, _ in rows() if len(re.findall(r"[.](?= |$)", meaning)) > 2]
