"""A fingerprint of a checkpoint, so that two engines do not mix the KV of two models of one shape."""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)

_FORMATS = frozenset({"auto", "hf", "safetensors", "instanttensor", "fastsafetensors"})
"""Load formats that read safetensors files."""


def fingerprint_of(vllm_config: VllmConfig) -> str:
    """Of the safetensors files that this engine loads; empty (not compared) for anything else.

    A hash over name, dtype, shape and two rows of every tensor (the whole of it where it is a vector):
    whatever the files are called, however many there are, different weights differ, and it costs
    milliseconds.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _FORMATS:
        return ""
    folder = _folder_of(model.model_weights or model.model, model.revision, load.download_dir)
    files = tuple(sorted(folder.glob("*.safetensors"))) if folder is not None else ()
    if not files:
        _log.info(
            "no safetensors files of %s are found: its weights are not compared with the peer's", model.model
        )
        return ""
    return _hash_of(files)


def _folder_of(model: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


@functools.cache
def _hash_of(files: tuple[Path, ...]) -> str:
    import torch
    from safetensors import safe_open

    samples = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                tensor = tensors.get_slice(name)
                shape = tensor.get_shape()
                if len(shape) < 2:  # norms, biases, scales: small
                    rows = [tensors.get_tensor(name).view(-1)]
                else:
                    middle = shape[0] // 2
                    rows = [tensor[:1], tensor[middle : middle + 1]]
                data = b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)
                samples[name] = f"{name} {tensor.get_dtype()} {shape} ".encode() + data
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(samples):
        digest.update(hashlib.blake2b(samples[name], digest_size=16).digest())
    return f"safetensors:{digest.hexdigest()}"
