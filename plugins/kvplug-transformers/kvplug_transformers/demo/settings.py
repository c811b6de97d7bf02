"""The settings of a demo, which the command line makes, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


def builtin_prompt() -> str:
    """The default prompt: about a thousand tokens with SmolLM2's vocabulary."""
    return Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8").rstrip("\n")


@attrs.frozen(kw_only=True)
class DemoSettings:
    """One run of the demo."""

    prompt: str
    model: Path | None = None
    """A Hugging Face folder; ``None`` is the packaged model."""
    config: Path | None = None
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    """Config keys that the command line sets."""
    max_new_tokens: int = 64
    repeat: int = 0
    """How often the time to the first token is measured again, in turns with its floor."""
    at_once: int = 1
    """The number of concurrent requests for the prompt in these repetitions."""
    block_size: int = 16
    policy: str = "recompute"
    """What to do with a request whose KV failed to load: "recompute" or "fail"."""
    layout: str | None = None
    """``None``: the connector's required layout, else ``KBTHD``."""
    tensor_parallel: tuple[int, int] = (1, 1)
    """Workers that share the model: in the prefill engine, and in the decode engine."""
    corrupt: bool = False
    patience_s: float = 300.0
    """How long a worker may report nothing while the demo waits for it, beyond the worker's own deadlines."""


@attrs.frozen(kw_only=True)
class Report:
    """The results, exactly as ``--json`` prints them."""

    prompt_tokens: int
    tokens_found: int
    """Tokens that the prefill worker did not compute, since its stores had their KV from an earlier run."""
    tokens_loaded: int
    kv_bytes: int
    """Bytes of the loaded tokens' keys and values, in all layers."""
    transfer_s: float | None
    """Seconds from the request for the KV until all of it is in the decode worker's cache."""
    gb_per_s: float | None
    ttft_s: float | None
    """Seconds from the request's arrival in the decode worker to its first token: match, load, compute the
    rest."""
    ttft_parts_s: Mapping[str, float]
    """The spans of ``ttft_s``, which follow each other: queue, match, schedule, prefill."""
    ttft_recompute_s: float | None
    """The same in the same process without a connector: the whole prompt is computed."""
    ttft_floor_s: float | None
    """The same with the loaded tokens' KV in the engine's own blocks already, the fastest of three times,
    plus one copy of its bytes; at most ``ttft_s``. ``None``: nothing was loaded, or the first token was
    another one, by rounding."""
    ttft_pairs: tuple[tuple[float, float], ...]
    """With ``--repeat``: the time to the first token, and its floor right after it, for each time that all KV
    was loaded again and both first tokens were the same."""
    identical: bool
    text: str
    connector: str
    transport: str
    tensor_parallel: tuple[int, int]
    """How many workers share the model: in the prefill engine, and in the decode engine."""
    queue: str
    """The message queue that carries each step to the workers; empty if each engine has one worker."""
    communicator: str
    """The device communicator with which the workers add up their results; empty like ``queue``."""
    store: str
    """The store that the KV came from, and how; empty if the connector has none."""
    device: str
    """The config's device, on which all three processes computed."""
    reasons: tuple[str, ...]
    """Why this transport was chosen, why the others were not, and what else went wrong."""

    @property
    def ok(self) -> bool:
        return self.identical and self.tokens_loaded > 0
