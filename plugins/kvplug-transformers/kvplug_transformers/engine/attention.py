"""The paged cache inside a Hugging Face model.

transformers requires two things from an engine that has its own KV cache: a ``Cache`` whose ``update`` each
attention layer calls with the new keys and values, and an attention function that is found by name through
``AttentionInterface``. Both are here, and both work on one :class:`ForwardPass`: the current forward pass,
with the tokens of all its requests packed one after another in a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvplug import UnsupportedError
from kvplug.engine import WorkerConnector
from kvplug_transformers.engine.pages import Pages
from kvplug_transformers.engine.step import Step

PAGED = "kvplug-paged"
"""The name of the attention function in transformers."""


@attrs.frozen
class _Part:
    """The tokens of one request in a forward pass."""

    new: int
    """How many are computed."""
    total: int
    """How many the request has once they are computed."""
    block_table: Tensor
    mask: Tensor | None
    """``None`` if all tokens are new (causal attention is enough) or only one is."""


@attrs.define(eq=False)
class ForwardPass:
    """One forward pass: its packed tokens, and the progress through the layers."""

    pages: Pages
    positions: list[int]
    """The position of each token in its request."""
    slots: Tensor
    """int64 [num_tokens]: ``block_id * block_size + offset`` of each token, on the model's device."""
    parts: list[_Part]
    layer: int = -1
    num_attended: int = 0

    @classmethod
    def over(cls, pages: Pages, step: Step) -> ForwardPass:
        device, size = pages.tensor.device, pages.block_size
        positions: list[int] = []
        slots: list[int] = []
        parts = []
        for one, table in zip(step.scheduled, step.block_tables, strict=True):
            new = one.num_scheduled_tokens
            total = one.num_computed_tokens + new
            added = range(one.num_computed_tokens, total)
            positions += added
            slots += [table[position // size] * size + position % size for position in added]
            blocks = torch.tensor(table, dtype=torch.int64, device=device)
            parts.append(_Part(new, total, blocks, _causal_mask(new, total, device)))
        return cls(pages, positions, torch.tensor(slots, dtype=torch.int64, device=device), parts)

    def attend(self, module: torch.nn.Module, query: Tensor, **kwargs: Any) -> Tensor:
        """Attention of the packed queries, request by request, each over its own pages.

        ``query``: [1, num_heads, num_tokens, head_size]; returns [1, num_tokens, num_heads, head_size].
        """
        outputs = []
        for part, packed in zip(self.parts, query.split([part.new for part in self.parts], 2), strict=True):
            key, value = self.pages.read(self.layer, part.block_table, part.total)
            output, _ = sdpa_attention_forward(module, packed, key[None], value[None], part.mask, **kwargs)
            outputs.append(output)
        self.num_attended += 1
        return torch.cat(outputs, dim=1)


def _causal_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """The mask of the last ``new`` of ``total`` tokens; each sees itself and all before: bool [1, 1, new,
    total].
    """
    if new == 1 or new == total:
        return None
    return torch.ones((new, total), dtype=torch.bool, device=device).tril(total - new)[None, None]


class PagedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Writes each layer's new keys and values into the pages, and calls the connector before and after."""

    def __init__(self, under_way: ForwardPass, connector: WorkerConnector | None) -> None:
        super().__init__(layers=[])
        self._pass = under_way
        self._connector = connector

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention layer; shapes [1, num_kv_heads, num_tokens, head_size]."""
        pages, connector = self._pass.pages, self._connector
        name = pages.layer_names[layer_idx]
        if connector is not None:
            # First, since a load may write to the slots that are written below.
            connector.wait_for_layer_load(name)  # [connector]
        pages.write(
            layer_idx, self._pass.slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        )
        if connector is not None:
            connector.save_kv_layer(name, pages.tensor[layer_idx])  # [connector]
        self._pass.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: with several requests packed together, positions are passed to the model instead."""
        return 0


_UNDER_WAY: ContextVar[ForwardPass] = ContextVar("kvplug_pass_under_way")


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in each layer. ``key`` and ``value`` are already in the pages."""
    kwargs.pop("is_causal", None)
    return _UNDER_WAY.get().attend(module, query, **kwargs), None


AttentionInterface.register(PAGED, paged_attention)


@contextmanager
def under_way(model: PreTrainedModel, this: ForwardPass) -> Iterator[None]:
    """Let ``model`` attend through the pages of ``this`` pass; restores its attention at the end.

    Raises:
        UnsupportedError: a layer did not use them, so its output is wrong.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(PAGED)
    token = _UNDER_WAY.set(this)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)
        model.set_attn_implementation(before)
    layers = len(this.pages.layer_names)
    if this.num_attended != layers:
        raise UnsupportedError(
            f"{type(model).__name__}: {this.num_attended} of {layers} layers attended through the paged"
            " cache; its attention does not go through transformers' AttentionInterface"
        )
