"""One step's work, from the scheduler to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.engine import BlockIds, Plain, ScheduledRequest, SchedulerOutput

_PLAIN = ("token_ids", "block_tables", "samples", "metadata")


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

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a message queue, without the lookups of ``output``: the scheduler keeps them."""
        return {
            "step": self.output.step,
            "scheduled": [attrs.astuple(one) for one in self.output.scheduled],
            "preempted": list(self.output.preempted_request_ids),
            "finished": list(self.output.finished_request_ids),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Step:
        """The inverse of :meth:`to_plain`."""
        return cls(
            output=SchedulerOutput(
                step=plain["step"],
                scheduled=tuple(
                    ScheduledRequest(request_id=name, num_computed_tokens=computed, num_scheduled_tokens=new)
                    for name, computed, new in plain["scheduled"]
                ),
                block_ids=dict[str, BlockIds]().__getitem__,
                preempted_request_ids=frozenset(plain["preempted"]),
                finished_request_ids=frozenset(plain["finished"]),
            ),
            **{name: plain[name] for name in _PLAIN},
        )
