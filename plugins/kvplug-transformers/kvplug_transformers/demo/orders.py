"""What a demo is told to do: plain values, made by the command line, sent to the workers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Orders:
    """One run of the demo."""

    prompt: str
    model: Path | None = None
    """A Hugging Face folder; ``None`` is the model that comes as a package."""
    config: Path | None = None
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    """Keys of the config that the command line set."""
    max_new_tokens: int = 64
    block_size: int = 16
    layout: str | None = None
    """``None``: what the connector insists on, else ``KBTHD``."""
    corrupt: bool = False
    patience_s: float = 300.0
    """How long a process that is waited for may report nothing, beyond its own deadlines."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "config": None if self.config is None else str(self.config),
            "overrides": dict(self.overrides),
            "block_size": self.block_size,
            "layout": self.layout,
        }


@attrs.frozen(kw_only=True)
class Report:
    """What came out: exactly what ``--json`` prints."""

    prompt_tokens: int
    tokens_loaded: int
    kv_bytes: int
    """Of the loaded tokens: keys and values, all layers."""
    transfer_s: float | None
    """From asking for the KV until all of it is in the decode worker's cache."""
    gb_per_s: float | None
    ttft_s: float | None
    """From the request's arrival in the decode worker to its first token: match, load, compute the rest."""
    ttft_recompute_s: float | None
    """The same in the same process with no connector: the whole prompt computed."""
    identical: bool
    text: str
    connector: str
    transport: str
    device: str
    """Where all three processes computed, as the config has it."""
    reasons: tuple[str, ...]
    """Why that transport, why not the others, and whatever else did not go as it should."""

    @property
    def ok(self) -> bool:
        return self.identical and self.tokens_loaded > 0
