"""The laws by their ids, as docs/reference/laws.md has them: what a test names, and a failure quotes."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen
class Law:
    """One law."""

    id: str
    """Also the heading's, in docs/reference/laws.md."""
    title: str

    @property
    def page(self) -> str:
        """Where it is written out, within the documentation."""
        return f"docs/reference/laws.md#{self.id.lower()}"

    def __str__(self) -> str:
        return f"{self.id} ({self.title})"


LAWS: Final = {
    id_: Law(id_, title)
    for id_, title in {
        "ALL-1": "closing",
        "ALL-2": "a dead peer",
        "ALL-3": "a silent peer",
        "ALL-4": "time",
        "ALL-5": "every transfer ends",
        "ALL-6": "forks",
        "ALL-7": "nothing left behind",
        "END-1": "two verbs",
        "END-2": "coming and going",
        "PIPE-1": "what arrives",
        "PIPE-2": "sending",
        "PIPE-3": "what is held",
        "PIPE-4": "whose memory",
        "PIPE-5": "receiving into memory",
        "PIPE-6": "a receive that runs out of time",
        "PIPE-7": "threads",
        "QUEUE-1": "every reader, every message",
        "QUEUE-2": "dead readers",
        "QUEUE-3": "waiting",
        "QUEUE-4": "idling",
        "QUEUE-5": "chunks",
        "COMM-1": "what a collective gives",
        "COMM-2": "who takes part",
        "COMM-3": "what is refused",
        "LOOKUP-1": "the key",
        "LOOKUP-2": "matching",
        "LOOKUP-3": "`match`",
        "LOOKUP-4": "`drop_select`",
        "LOOKUP-5": "room",
        "LOOKUP-6": "cost",
        "LOOKUP-7": "`select`",
        "LOOKUP-8": "`clear`",
        "LOOKUP-9": "events",
        "CONN-1": "order",
        "CONN-2": "promises",
        "CONN-3": "failed loads",
        "CONN-4": "lent blocks",
        "CONN-5": "named once",
        "CONN-6": "steps in flight",
        "CONN-7": "forgetting",
        "CONN-8": "figures",
        "REF-1": "what they carry",
        "REF-2": "through strangers' hands",
        "PLUGIN-1": "being found",
        "PLUGIN-2": "light to load",
        "PLUGIN-3": "claims",
        "PLUGIN-4": "documented",
    }.items()
}
"""By id, in the order of the page."""
