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
from kvplug_transformers.engine.batch import Batch
from kvplug_transformers.engine.pages import Pages

PAGED = "kvplug-paged"
"""The name of the attention function in transformers."""


@attrs.define(eq=False)
class ForwardPass:
    """One forward pass: the slot of each token, and the progress through the layers."""

    pages: Pages
    batch: Batch
    slots: Tensor
    """int64 [num_tokens]: ``batch.slot_mapping`` on the model's device."""
    block_tables: list[Tensor]
    masks: list[Tensor | None]
    """The attention mask of each request's new tokens. ``None`` if all tokens are new (causal attention is
    enough) or only one is.
    """
    layer: int = -1
    num_attended: int = 0

    @classmethod
    def over(cls, pages: Pages, batch: Batch) -> ForwardPass:
        device = pages.tensor.device
        return cls(
            pages=pages,
            batch=batch,
            slots=torch.tensor(batch.slot_mapping, dtype=torch.int64, device=device),
            block_tables=[
                torch.tensor(table, dtype=torch.int64, device=device) for table in batch.block_tables
            ],
            masks=[
                _causal_mask(new, total, device)
                for new, total in zip(batch.query_lens, batch.seq_lens, strict=True)
            ],
        )

    def attend(self, module: torch.nn.Module, query: Tensor, **kwargs: Any) -> Tensor:
        """Attention of the packed queries, request by request, each over its own pages.

        ``query``: [1, num_heads, num_tokens, head_size]; returns [1, num_tokens, num_heads, head_size].
        """
        outputs = []
        start = 0
        for new, total, table, mask in zip(
            self.batch.query_lens, self.batch.seq_lens, self.block_tables, self.masks, strict=True
        ):
            key, value = self.pages.read(self.layer, table, total)
            output, _ = sdpa_attention_forward(
                module, query[:, :, start : start + new], key[None], value[None], mask, **kwargs
            )
            outputs.append(output)
            start += new
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
        under_way, connector = self._pass, self._connector
        name = under_way.pages.layer_names[layer_idx]
        active = connector is not None and connector.has_connector_metadata()
        if active:
            # First, since a load may write to the slots that are written below.
            connector.wait_for_layer_load(name)  # type: ignore[union-attr]  # [connector]
        under_way.pages.write(
            layer_idx, under_way.slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        )
        if active:
            connector.save_kv_layer(  # type: ignore[union-attr]  # [connector]
                name, under_way.pages.tensor[layer_idx]
            )
        under_way.layer = layer_idx
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
