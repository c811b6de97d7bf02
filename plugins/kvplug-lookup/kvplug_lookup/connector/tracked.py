"""A request, as the scheduler side knows it."""

from __future__ import annotations

import attrs

from kvplug.engine import Request
from kvplug_lookup.connector.keys import PromptChains
from kvplug_lookup.connector.matching import Runs, Search


@attrs.define(eq=False)
class Tracked:
    """What is remembered of a request between its first call and its last."""

    request: Request
    chains: PromptChains
    search: Search
    has_reader: bool
    """Another engine is going to load its pages."""
    num_computed_at_match: int = 0
    num_promised: int = 0
    """When it was last asked about, and its blocks were not allocated yet."""
    sources: tuple[Runs, ...] = ()
    """Of what is promised: for each worker."""
    num_saved: int = 0
    """Pages whose save is planned, or which need none."""
    has_failed: bool = False
    """A load failed: it is computed from now on, without another try."""
    is_loading: bool = False
    """A background load is writing into its blocks."""
    is_old: bool = False
    """It may hold KV from before a reset: nothing of it is saved until its first token is computed again."""
