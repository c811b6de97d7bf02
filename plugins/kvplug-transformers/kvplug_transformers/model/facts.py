"""Describes a Hugging Face model for kvplug, and refuses models that this engine cannot serve."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvplug import UnsupportedError
from kvplug.engine import ModelInfo

_NOT_KV = (
    # (part of a cache layer's class name, what it means); the first match is reported
    ("Sliding", "it keeps a sliding window only"),
    ("Linear", "it has recurrent layers, whose state is not keys and values per token"),
    ("Indexed", "it keeps an index of its keys beside them"),
    ("Compressed", "it keeps compressed keys"),
    ("Dummy", "some of its layers use the cache of others, or have none"),
)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """A model as the engine sees it."""

    info: ModelInfo
    context: int
    """The model's maximum number of tokens."""
    layer_names: tuple[str, ...]


def describe(model: PreTrainedModel, name: str = "") -> ModelFacts:
    """Describe a model's KV cache, from its config and a run of two tokens.

    Raises:
        UnsupportedError: its cache is not full keys and values in every layer, or its attention cannot be
            replaced; names the model's class and the reason.
    """
    config = model.config.get_text_config(decoder=True)
    _refuse(model, config)
    key = _probe(model)
    info = ModelInfo(
        name=name or getattr(model.config, "_name_or_path", "") or type(model).__name__,
        attention="mha",
        num_layers=config.num_hidden_layers,
        num_kv_heads=key.shape[1],
        head_size=key.shape[3],
        dtype=str(key.dtype).removeprefix("torch."),
        rope=ModelInfo.positions_of(config),
        window=None,
        weights=fingerprint(model),
    )
    names = tuple(f"model.layers.{index}.self_attn" for index in range(config.num_hidden_layers))
    return ModelFacts(info=info, context=_context(config), layer_names=names)


def _context(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", 0) or 2**31)


def _refuse(model: PreTrainedModel, config: Any) -> None:
    def refuse(why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(model).__name__} ({config.model_type}) cannot be served by this engine: {why}. It takes"
            " causal language models that keep all keys and values of every layer."
        )

    if getattr(model.config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder model, whose cache contains cross-attention")
    if getattr(model, "_is_stateful", False):
        raise refuse("it keeps a recurrent state instead of keys and values per token")
    if getattr(config, "kv_lora_rank", None):
        raise refuse("it has latent attention (MLA)")
    layers = DynamicCache(config=config).layers
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    for kind in kinds:
        why = next((why for word, why in _NOT_KV if word in kind), f"its cache layers are {kind}")
        windows = {size for layer in layers if (size := getattr(layer, "sliding_window", None))}
        raise refuse(f"{why} ({', '.join(map(str, sorted(windows)))} tokens)" if windows else why)
    if getattr(config, "attn_logit_softcapping", None):
        raise refuse("it caps its attention scores (softcapping), which the paged attention does not do")
    if not getattr(model, "_supports_attention_backend", False) or not model._supports_sdpa:
        raise refuse("its attention cannot be replaced through transformers' AttentionInterface")


def _probe(model: PreTrainedModel) -> torch.Tensor:
    """Keys of the first layer after two tokens, [1, num_kv_heads, 2, head_size].

    The configuration alone does not determine these sizes reliably.
    """
    ids = torch.zeros((1, 2), dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        output = model.eval()(input_ids=ids, use_cache=True)
    cache = output.get(cache_argument(model))
    layers = cache.layers if isinstance(cache, Cache) else []
    shapes = {
        (tuple(tensor.shape), tensor.dtype) for layer in layers for tensor in (layer.keys, layer.values)
    }
    if len(shapes) != 1:
        found = "; ".join(sorted(f"{list(shape)} {dtype}" for shape, dtype in shapes)) or type(cache).__name__
        raise UnsupportedError(
            f"{type(model).__name__} cannot be served by this engine: its keys and values do not have one"
            f" shape in all layers ({found})"
        )
    key: torch.Tensor = layers[0].keys
    return key


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache in the arguments and the output of the model's forward pass.

    It is "cache" since transformers 5.24, which warns about the older name.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fingerprint(model: PreTrainedModel) -> str:
    """A hash over a sample of every parameter and buffer (quantised weights are buffers): it differs for
    different weights, and takes milliseconds.

    The sample is converted to float32, so that the hash does not depend on the dtype.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # a module's own state
            digest.update(f"{name}{tensor!r}".encode())
            continue
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() // 64)].to(torch.float32).cpu().contiguous()
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
