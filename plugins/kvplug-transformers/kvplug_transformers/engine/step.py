"""One step's work, from the scheduler to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.engine import Plain, ScheduledRequest


@attrs.frozen(kw_only=True)
class Step:
    """One step's work, as the worker side receives it."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted_request_ids: frozenset[str]
    finished_request_ids: frozenset[str]
    token_ids: tuple[tuple[int, ...], ...]
    """The tokens to compute for each scheduled request."""
    block_tables: tuple[tuple[int, ...], ...]
    """The blocks of each request, in token order."""
    samples: tuple[bool, ...]
    """Whether each request's last token is computed, so that the next one can be sampled."""
    metadata: Plain
    """From ``build_connector_meta``, for ``bind_connector_metadata``."""

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a message queue."""
        return {
            **attrs.asdict(self, recurse=False),
            "scheduled": [attrs.asdict(one) for one in self.scheduled],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Step:
        """The inverse of :meth:`to_plain`."""
        scheduled = tuple(ScheduledRequest(**one) for one in plain["scheduled"])
        return cls(**{**plain, "scheduled": scheduled})
