"""The scheduler side's state of a request."""

from __future__ import annotations

import time
from typing import Final

import attrs

from kvplug.engine import Request
from kvplug_lookup.connector.keys import PromptChains
from kvplug_lookup.connector.matching import Runs, Search

_MAX_PAUSE_S: Final = 60.0
"""The longest pause before unsaved pages are saved again; the first pause is a second."""


@attrs.define(eq=False)
class Tracked:
    """The state of a request between its first call and its last."""

    request: Request
    chains: PromptChains
    search: Search
    has_reader: bool
    """Another engine will load its pages."""
    num_computed_at_match: int = 0
    """Tokens that the engine had in its own cache when it last asked."""
    num_sure: int | None = None
    """Leading tokens that no other connector can be loading before its first step; ``None``: its blocks were
    not allocated since the last match."""
    is_matched: bool = False
    """The first match is counted; an engine without free blocks asks again in each step."""
    sources: tuple[Runs, ...] = ()
    """For each worker, the sources of the promised pages."""
    num_computed: int = 0
    """Tokens that the planned steps have computed; 0 after a preemption."""
    num_saved: int = 0
    """Pages whose save was planned, or that need no save."""
    num_read: int = 0
    """Pages before those that the workers may give up together with the request's blocks."""
    unsaved_from: int | None = None
    """The first page whose planned save has failed at a worker."""
    num_announced: int = 0
    """Pages that stores expect a reader for."""
    num_unsaved: int = 0
    """How often a save has failed at a worker."""
    save_again_at: float = 0.0
    """When these saves are planned again."""
    saved_in: int = -1
    """The last step that saves pages of it."""
    has_failed: bool = False
    """A load failed: the request is computed, without another load."""
    is_loading: bool = False
    """A background load is writing into its blocks."""
    is_old: bool = False
    """It may hold KV from before a reset: no page is saved until its first token is computed again."""

    def ask(self, num_computed_tokens: int) -> None:
        """Note the engine's question: what can be loaded beyond these tokens in its own cache?"""
        self.num_computed_at_match, self.num_sure = num_computed_tokens, None

    def allocate(self, num_external_tokens: int) -> None:
        """Note that the request has blocks, and loads this many of the promised tokens into them."""
        if self.num_sure is None:
            self.num_sure = self.num_computed_at_match + num_external_tokens
        else:  # it waited for a load that has been reported
            self.num_sure = len(self.request.token_ids)

    def restart_saves(self) -> None:
        """Save all its pages again, in later steps."""
        self.num_saved, self.unsaved_from = 0, None
        self.num_announced = 0  # unsaved pages were withdrawn

    def preempt(self, search: Search, *, is_read: bool) -> None:
        """Note that it has lost its blocks. ``is_read``: the workers have read all planned pages."""
        self.search, self.num_computed = search, 0
        if not is_read:
            self.num_saved = min(self.num_saved, self.num_read)

    def compute(self, start: int, end: int, page_tokens: int) -> None:
        """Note that a step computes these tokens. If the engine has gone back, save their pages again."""
        if start < self.num_computed:
            self.num_saved = min(self.num_saved, start // page_tokens)
        self.num_computed = end
        if self.unsaved_from is not None and time.monotonic() >= self.save_again_at:
            self.num_saved, self.unsaved_from = min(self.num_saved, self.unsaved_from), None

    def miss(self, page: int) -> None:
        """Note that a worker could not save this page."""
        self.unsaved_from = page if self.unsaved_from is None else min(page, self.unsaved_from)
        self.save_again_at = time.monotonic() + min(2.0**self.num_unsaved, _MAX_PAUSE_S)
        self.num_unsaved += 1
        self.num_announced = min(self.num_announced, page)  # it was withdrawn
