"""A request, as the scheduler side knows it."""

from __future__ import annotations

import time
from typing import Final

import attrs

from kvplug import KvplugError
from kvplug.engine import Request
from kvplug_lookup.connector.keys import PromptChains
from kvplug_lookup.connector.matching import Runs, Search

_MAX_PAUSE_S: Final = 60.0
"""The longest pause before pages that were not kept are saved again; the first is a second."""


@attrs.define(eq=False)
class Tracked:
    """What is remembered of a request between its first call and its last."""

    request: Request
    chains: PromptChains
    search: Search
    has_reader: bool
    """Another engine is going to load its pages."""
    num_computed_at_match: int = 0
    """Tokens that the engine had in its own cache when it last asked."""
    num_promised: int = 0
    """When it was last asked about, and its blocks were not allocated yet."""
    num_sure: int | None = None
    """Of the tokens before its first step those that no other connector can be loading; ``None``: its blocks
    were not allocated since it was last asked about."""
    is_matched: bool = False
    """The first answer is counted; an engine without free blocks asks again in each step."""
    sources: tuple[Runs, ...] = ()
    """Of what is promised: for each worker."""
    num_computed: int = 0
    """Tokens that the planned steps have computed; none of them after a preemption."""
    num_saved: int = 0
    """Pages whose save was planned, or which need none."""
    num_read: int = 0
    """Pages before those of a save that the workers may give up with the request's blocks."""
    unsaved_from: int | None = None
    """The first page that a worker has not kept, though its save was planned."""
    num_announced: int = 0
    """Pages for which stores expect the reader."""
    num_unsaved: int = 0
    """How often a worker has not kept a page."""
    save_again_at: float = 0.0
    """When these pages are planned again."""
    saved_in: int = -1
    """The last step that saves some of its pages."""
    has_failed: bool = False
    """A load failed: it is computed from now on, without another try."""
    is_loading: bool = False
    """A background load is writing into its blocks."""
    is_old: bool = False
    """It may hold KV from before a reset: nothing of it is saved until its first token is computed again."""

    def ask(self, num_computed_tokens: int) -> None:
        """The engine asks what can be loaded beyond these tokens, which it has in its own cache."""
        self.num_computed_at_match, self.num_promised, self.num_sure = num_computed_tokens, 0, None

    def allocate(self, num_external_tokens: int) -> None:
        """The request has blocks, and so many tokens of what was promised are loaded into them.

        Raises:
            KvplugError: fewer were promised.
        """
        promised, self.num_promised = self.num_promised, 0
        if num_external_tokens > promised:
            raise KvplugError(
                f"update_state_after_alloc was called for {num_external_tokens} external tokens of request"
                f" {self.request.request_id}, and get_num_new_matched_tokens had last promised {promised}"
            )
        if self.num_sure is None:
            self.num_sure = self.num_computed_at_match + num_external_tokens
        else:  # it has waited for a load, whose report has come
            self.num_sure = len(self.request.token_ids)

    def restart_saves(self) -> None:
        """All its pages are saved again, in later steps."""
        self.num_saved, self.unsaved_from = 0, None
        self.num_announced = 0  # what was not kept was withdrawn

    def preempt(self, search: Search, *, is_read: bool) -> None:
        """It has lost its blocks. ``is_read``: the workers have read all planned pages out of them."""
        self.search, self.num_computed = search, 0
        if not is_read:
            self.num_saved = min(self.num_saved, self.num_read)

    def compute(self, start: int, end: int, page_tokens: int) -> None:
        """A step computes these tokens. Where the engine has gone back, their pages are saved again."""
        if start < self.num_computed:
            self.num_saved = min(self.num_saved, start // page_tokens)
        self.num_computed = end
        if self.unsaved_from is not None and time.monotonic() >= self.save_again_at:
            self.num_saved, self.unsaved_from = min(self.num_saved, self.unsaved_from), None

    def miss(self, page: int) -> None:
        """A worker has not kept this page."""
        self.unsaved_from = page if self.unsaved_from is None else min(page, self.unsaved_from)
        self.save_again_at = time.monotonic() + min(2.0**self.num_unsaved, _MAX_PAUSE_S)
        self.num_unsaved += 1
        self.num_announced = min(self.num_announced, page)  # it was withdrawn
