"""One request in the engine: its tokens, its blocks, and its status."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.engine import BlockIds, Request


class Status(enum.StrEnum):
    """The status of a request."""

    WAITING = "waiting"
    """In the queue: new, preempted, or back from an asynchronous load."""
    LOADING = "loading"
    """An asynchronous load uses its blocks until ``get_finished`` names it."""
    RUNNING = "running"
    """Has blocks; each step may compute some of its tokens."""
    FINISHED = "finished"


@attrs.frozen(kw_only=True)
class Token:
    """The result of a step for one request."""

    request_id: str
    token_id: int | None
    """``None`` if the request ended without a token, because of an error."""
    finish_reason: str | None = None
    """``"stop"`` (an end token), ``"length"``, ``"error"``, ``"abort"``; ``None`` while it continues."""
    error: str = ""
    params: Mapping[str, Any] | None = None
    """``kv_transfer_params`` from the connector, with the last token."""


@attrs.define(kw_only=True, eq=False)
class Sequence:
    """The engine's own, mutable record of a request; connectors see :meth:`as_request`."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    extra: bytes = b""
    params: Mapping[str, Any] = attrs.field(factory=dict)

    output: list[int] = attrs.field(factory=list)
    status: Status = Status.WAITING
    block_ids: list[int] = attrs.field(factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks, including loaded ones."""
    num_loaded_tokens: int = 0
    """How many of them were loaded."""
    external_end: int = 0
    """The number of tokens after the current load ends; 0 if there is no load."""
    valid_up_to: int | None = None
    """The first token of a failed block of the current load: earlier tokens are valid."""
    may_load: bool = True
    """Whether to ask the connector before computing. False after a load of this request has failed."""
    generation: int = 0
    num_preemptions: int = 0
    num_failed_loads: int = 0
    load_error: str = ""
    """The tokens that the last failed load lacked; kept after they are recomputed."""
    finish_reason: str | None = None
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def all_tokens(self) -> list[int]:
        """Token ids of the prompt, then of the output."""
        return [*self.prompt, *self.output]

    def as_request(self) -> Request:
        """The request that a connector sees."""
        return Request(
            request_id=self.request_id,
            token_ids=tuple(self.all_tokens),
            num_prompt_tokens=len(self.prompt),
            extra=self.extra,
            generation=self.generation,
            params=self.params,
        )

    def as_block_ids(self) -> BlockIds:
        """The blocks; one tuple, since there is one KV cache group."""
        return (tuple(self.block_ids),)

    def start_over(self) -> None:
        """Reset to nothing computed: the blocks are gone, or their content is invalid."""
        self.num_computed_tokens = 0
        self.num_loaded_tokens = 0
        self.external_end = 0
        self.valid_up_to = None
        self.generation += 1

    def append(self, token_id: int) -> str | None:
        """Add a generated token; returns the finish reason if it is the last one."""
        self.output.append(token_id)
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if len(self.output) >= self.max_new_tokens else None
