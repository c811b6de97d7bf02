"""Requests of a :class:`~kvplug_testing.engine.schedule.Schedule`: their arrival and their progress."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.engine.connector.values import Request, RequestEnd


@attrs.frozen(kw_only=True)
class Arrival:
    """A request that comes, and how it ends."""

    request_id: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    """Tokens that it computes one by one after the prompt."""
    extra: bytes = b""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    end: RequestEnd = RequestEnd.FINISHED
    """One that does not finish ends at any time: before, during and after its load."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.generated


class State(enum.Enum):
    WAITING = "without blocks"
    LOADING = "in the background"
    HELD = "waits for a load that its step could have needed"
    RUNNING = "computes"


@attrs.define(eq=False)
class Running:
    """A request of a schedule."""

    arrival: Arrival
    state: State = State.WAITING
    blocks: tuple[int, ...] = ()
    num_computed: int = 0
    """As far as steps were planned."""
    num_right: int = 0
    """As far as the engine has heard that they went well."""
    generation: int = 0
    life: int = 0
    """Grows when it goes back: what steps before that computed does not count."""
    must_run: bool = False
    """Its blocks are allocated for the next step."""
    is_mixed: bool = False
    """It went on when the weights changed: what it computes is right for neither."""

    @property
    def name(self) -> str:
        return self.arrival.request_id

    @property
    def rest(self) -> int:
        return len(self.arrival.tokens) - self.num_computed

    def request(self, num_tokens: int = 0) -> Request:
        """As the engine shows it: the prompt, and of what was generated as much as there is."""
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
