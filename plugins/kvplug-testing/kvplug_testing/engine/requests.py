"""Requests of a :class:`~kvplug_testing.engine.schedule.Schedule`: their arrival and their progress."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.engine import Request, RequestEnd


@attrs.frozen(kw_only=True)
class Arrival:
    """A request that arrives, and how it ends."""

    request_id: str
    """Unique among the requests of its engine."""
    prompt: tuple[int, ...]
    """Token ids."""
    generated: tuple[int, ...] = ()
    """Tokens that it generates one by one after the prompt."""
    extra: bytes = b""
    """What determines its KV besides its tokens: that of :class:`~kvplug.engine.Request`."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """``kv_transfer_params``, as a client or a router would send them."""
    end: RequestEnd = RequestEnd.FINISHED
    """With another value than ``FINISHED`` it ends at a random time: before, during or after its load."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, and what is generated after it."""
        return self.prompt + self.generated


class State(enum.Enum):
    WAITING = "without blocks"
    LOADING = "in the background"
    RUNNING = "computes"


@attrs.define(eq=False)
class Running:
    """A request of a schedule."""

    arrival: Arrival
    state: State = State.WAITING
    blocks: tuple[int, ...] = ()
    num_computed: int = 0
    """Tokens computed by planned steps."""
    num_right: int = 0
    """Tokens computed by steps that were reported as successful."""
    generation: int = 0
    life: int = 0
    """Grows on each rollback: results of earlier steps no longer count."""
    must_run: bool = False
    """Its blocks are allocated, so the next step must run it."""

    @property
    def name(self) -> str:
        return self.arrival.request_id

    @property
    def rest(self) -> int:
        return len(self.arrival.tokens) - self.num_computed

    def request(self, num_tokens: int = 0) -> Request:
        """The request as a connector sees it: the prompt, and the tokens generated so far."""
        prompt = len(self.arrival.prompt)
        shown = max(prompt, num_tokens, self.num_computed)
        return Request(
            request_id=self.name,
            token_ids=self.arrival.tokens[:shown],
            num_prompt_tokens=prompt,
            extra=self.arrival.extra,
            generation=self.generation,
            params=self.arrival.params,
        )

    def back_to(self, num_tokens: int) -> None:
        if self.num_computed > num_tokens:
            self.num_computed = num_tokens
            self.life += 1
        self.num_right = min(self.num_right, num_tokens)
