"""Plans which pages a step saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvplug.engine import SchedulerOutput, SpanLog
from kvplug.net.wire.token_ids import pack_tokens
from kvplug_lookup.connector.block_events import BlockEvents
from kvplug_lookup.connector.doubts import DoubtedBlocks
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.kept import KeptBlocks
from kvplug_lookup.connector.plan import SavePlan
from kvplug_lookup.connector.sources import Source
from kvplug_lookup.connector.tracked import Tracked


@attrs.frozen
class SavePlanner:
    """Plans saves of the whole pages that a step completes, and of pages whose save has failed."""

    _groups: Groups
    _page_tokens: int
    _own: Sequence[Source]
    """The sources that the workers put pages into; the first one expects the planned pages."""
    _wait_timeout_s: float
    """How long a request waits for such a page."""
    _kept: KeptBlocks
    """Knows which pages the workers have read."""
    _doubts: DoubtedBlocks
    """Knows which blocks may be wrong."""
    _events: BlockEvents | None
    """Receives the blocks of the pages."""
    _spans: SpanLog

    def plans(self, output: SchedulerOutput, requests: Mapping[str, Tracked]) -> Iterator[SavePlan]:
        """Yield the saves of a step, for known requests."""
        for scheduled in output.scheduled:
            tracked = requests.get(scheduled.request_id)
            if tracked is None:
                continue
            start = scheduled.num_computed_tokens
            end = start + scheduled.num_scheduled_tokens
            self._doubts.schedule(tracked, start, end, output.block_ids)
            tracked.compute(start, end, self._page_tokens)
            if tracked.is_old and start:
                continue
            tracked.is_old = False
            first = tracked.num_saved
            if end // self._page_tokens <= first:
                continue
            request = tracked.request
            token_ids = request.token_ids[: request.num_prompt_tokens]
            if output.token_ids is not None:
                token_ids = tuple(output.token_ids(request.request_id))
            # Only known tokens that this step computes; never tokens of a draft.
            end = min(end, len(token_ids))
            last = end // self._page_tokens
            if last <= first:
                continue
            tracked.num_saved = last
            blocks = self._groups.tables(output.block_ids(request.request_id), last * self._page_tokens)
            first = self._groups.first_whole_page(blocks, first, last, self._page_tokens)
            if last <= first:
                continue
            is_read = self._kept.is_read(tracked.saved_in)
            tracked.num_read = first if is_read else min(first, tracked.num_read)
            tracked.saved_in = output.step
            chains = tracked.chains.upto(token_ids, end)
            for source in self._own[:1]:
                source.expect(chains[first:last], self._wait_timeout_s)
            if self._events is not None:
                self._events.plan(request, token_ids, chains[:last], first)
            announced = max(first, tracked.num_announced) if tracked.has_reader else last
            tracked.num_announced = max(tracked.num_announced, last)
            tokens = token_ids[first * self._page_tokens : last * self._page_tokens]
            yield SavePlan(
                request_id=request.request_id,
                first_page=first,
                parent=tracked.chains.parent_of(first),
                packed_tokens=pack_tokens(tokens),
                block_ids=blocks,
                num_announced=min(announced, last) - first,
                traceparent=self._spans.traceparent_of(request.request_id),
            )
