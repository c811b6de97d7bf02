"""The five parts of an entry: checked, measured, copied."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvplug import UnsupportedError
from kvplug.transport import NamedExhaustion
from kvplug_lookup.buffer.index import TokenArray, token_array

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def owned_tokens(tokens: Any) -> Tensor:
    """Copy token ids to a new int64 CPU tensor of shape [num_tokens].

    Raises:
        UnsupportedError: the ids are not integers.
        ValueError: the ids are not one-dimensional.
    """
    return torch.from_numpy(token_array(tokens).copy())


def mask_array(roi: Any, num_tokens: int) -> Mask | None:
    """Convert a region of interest to a bool array; ``None`` (every token) stays ``None``.

    Raises:
        UnsupportedError: the roi is not boolean.
        ValueError: the roi is not as long as the tokens.
    """
    if roi is None:
        return None
    mask = roi.detach().cpu().numpy() if isinstance(roi, Tensor) else np.asarray(roi)
    if mask.size and mask.dtype != np.bool_:
        raise UnsupportedError(f"a roi must be boolean, not {mask.dtype}")
    if mask.shape != (num_tokens,):
        raise ValueError(f"a roi of shape {mask.shape} does not fit {num_tokens} tokens")
    as_bools: Mask = mask.astype(np.bool_, copy=False)
    return as_bools


def key_under(tokens: Any, roi: Any) -> TokenArray:
    """The key of an entry or a query: its tokens under the roi. May share memory."""
    found = token_array(tokens)
    mask = mask_array(roi, found.size)
    return found if mask is None else found[mask]


def extra_bytes(extra: Any) -> bytes:
    """Convert ``extra``, the part of the key besides the tokens, to bytes.

    Raises:
        UnsupportedError: it is not bytes. (``bytes`` of an int would be zeros.)
    """
    try:
        return bytes(memoryview(extra))
    except TypeError as e:
        raise UnsupportedError(f"extra must be bytes, not {type(extra).__name__}") from e


def count_layers(num_tokens: int, key: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> int:
    """The number of layers of key and value; 0 if there is neither.

    Raises:
        UnsupportedError: a part is not a tensor.
        ValueError: the shapes do not fit together.
    """
    num_layers: int | None = None
    for name, part in (("key", key), ("value", value), ("hidden", hidden)):
        if part is None:
            continue
        if not isinstance(part, Tensor):
            raise UnsupportedError(f"{name} must be a tensor or None, not {type(part).__name__}")
        if name == "hidden":
            continue
        if part.dim() < 2 or part.shape[1] != num_tokens:
            raise ValueError(
                f"{name} must have the shape [num_layers, {num_tokens} tokens, ...], got {list(part.shape)}"
            )
        if num_layers is not None and part.shape[0] != num_layers:
            raise ValueError(f"key has {num_layers} layers and value {part.shape[0]}")
        num_layers = int(part.shape[0])
    return num_layers or 0


def nbytes_of(*parts: Tensor | None) -> int:
    """Bytes of the elements, whatever memory the parts are views of."""
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


@NamedExhaustion("copying an entry")
def copy_of(part: Tensor | None, device: str | torch.device) -> Tensor | None:
    """Copy a part to ``device``, contiguous and bit by bit.

    Raises:
        ResourceExhaustedError: there is not enough memory.
    """
    if part is None:
        return None
    source = part.detach().resolve_conj().resolve_neg()
    copy = torch.empty(source.shape, dtype=source.dtype, device=device)
    bits = _BITS.get(source.element_size())
    if bits is None:
        copy.copy_(source)
    else:  # as integers, since some dtypes have no kernels to copy them
        copy.view(bits).copy_(source.view(bits))
    return copy


def describe_query(key: TokenArray | None) -> str:
    """Describe a query in messages, without token ids: they are a user's prompt."""
    return "a query for any entry" if key is None else f"a query of {key.size} tokens"
