"""One step's work, from the scheduler to the worker."""

from __future__ import annotations

import attrs

from kvplug.engine import Plain, SchedulerOutput


@attrs.frozen(kw_only=True)
class Step:
    """One step's work, as the worker side receives it."""

    output: SchedulerOutput
    """The plan as connectors see it."""
    token_ids: tuple[tuple[int, ...], ...]
    """The tokens to compute for each scheduled request."""
    block_tables: tuple[tuple[int, ...], ...]
    """The blocks of each request, in token order."""
    samples: tuple[bool, ...]
    """Whether each request's last token is computed, so that the next one can be sampled."""
    metadata: Plain
    """From ``build_connector_meta``, for ``bind_connector_metadata``."""
