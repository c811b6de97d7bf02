"""Cuts a Hugging Face model for tensor parallelism: heads of its attention, columns of its MLP.

The modules stay those of transformers. Projections into heads and columns keep the worker's rows, and
projections out of them its columns. A hook after the latter adds up the workers' partial results. Each worker
has the whole embeddings, norms and language model head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvplug import UnsupportedError

_CUT = ({"q_proj", "k_proj", "v_proj"}, "o_proj"), ({"gate_proj", "up_proj"}, "down_proj")
"""The projections of an attention and of an MLP: the ones cut by rows, and the one cut by columns."""
_TOLERANCE = 0.05
"""Tolerance relative to the largest logit. Reordered sums differ far less, wrong ones far more."""


def check_split(model: PreTrainedModel, size: int) -> None:
    """Check that ``size`` workers can share this model. Its weights are not read: it may be on ``meta``.

    Raises:
        UnsupportedError: they cannot; names the model's class and the reason.
    """
    for _ in _blocks(model, size):
        pass


def _blocks(model: PreTrainedModel, size: int) -> Iterator[tuple[list[nn.Linear], nn.Linear]]:
    """The projections of each attention and MLP to cut by rows, and the one to cut by columns."""
    config = model.config.get_text_config(decoder=True)

    def refuse(why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(model).__name__} ({config.model_type}) cannot be split over {size} workers: {why}"
        )

    parts = {
        what: count
        for what, name in (
            ("query heads", "num_attention_heads"),
            ("KV heads", "num_key_value_heads"),
            ("MLP columns", "intermediate_size"),
        )
        if (count := getattr(config, name, None))
    }
    odd = [f"{count} {what}" for what, count in parts.items() if count % size]
    if odd:
        most = min(parts.values())
        able = [str(n) for n in range(1, most + 1) if not any(count % n for count in parts.values())]
        raise refuse(f"it has {' and '.join(odd)}. It can be split over {', '.join(able[:8])}")
    for rows, columns in _CUT:
        found = 0
        for module in model.modules():
            children = dict(module.named_children())
            if columns not in children or not rows <= children.keys():
                continue
            named = [children[name] for name in (*sorted(rows), columns)]
            if any(type(each) is not nn.Linear for each in named):
                raise refuse(f"a projection of {type(module).__name__} is not a plain nn.Linear")
            found += 1
            yield named[:-1], named[-1]
        if found != config.num_hidden_layers:
            raise refuse(
                f"{found} of its {config.num_hidden_layers} layers have the projections"
                f" {', '.join(sorted(rows))} and {columns}"
            )


def split(
    model: PreTrainedModel, rank: int, size: int, all_reduce: Callable[[Tensor], Any], device: str
) -> None:
    """Keep the part of worker ``rank`` of ``size``, and move it to ``device``. All workers call it.

    ``all_reduce`` replaces a tensor by the sum of all workers'. At the end, a pass over a few tokens compares
    the workers' logits with those of the whole model.

    Raises:
        UnsupportedError: as :func:`check_split`; or the logits differ, because the model has another part
            that depends on its heads or columns.
    """
    blocks = list(_blocks(model, size))
    whole = _logits(model)
    with torch.no_grad():
        for by_rows, by_columns in blocks:
            for linear in by_rows:
                linear.weight = _part(linear.weight, 0, rank, size)
                if linear.bias is not None:
                    linear.bias = _part(linear.bias, 0, rank, size)
            by_columns.weight = _part(by_columns.weight, 1, rank, size)
            if rank and by_columns.bias is not None:
                by_columns.bias = None  # only one worker adds it
            by_columns.register_forward_hook(lambda _, __, partial: all_reduce(partial))
    model.to(device)
    try:
        difference = (_logits(model) - whole).abs().max()
    except RuntimeError as e:  # shapes that do not fit
        raise UnsupportedError(f"{type(model).__name__} cannot be split over {size} workers: {e}") from e
    if not difference <= _TOLERANCE * whole.abs().max():
        raise UnsupportedError(
            f"{type(model).__name__} cannot be split over {size} workers: its logits then differ by"
            f" {difference:.3g}, so another part of it depends on the number of heads or columns"
        )


def _part(whole: Tensor, dim: int, rank: int, size: int) -> nn.Parameter:
    """A copy of this worker's part; a part by rows stays a view, to share the file's mapped pages."""
    return nn.Parameter(whole.chunk(size, dim)[rank].contiguous(), requires_grad=False)


def _logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(8, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits.float().cpu()
