"""Fingerprints of checkpoints, so that engines do not mix the KV of different models with the same shapes."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvplug.engine import Checkpoint

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_log = logging.getLogger(__name__)

_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "mistral", "instanttensor", "fastsafetensors", "runai_streamer"}
)
"""Load formats that read safetensors files."""


def fingerprint_of(vllm_config: VllmConfig) -> str:
    """The fingerprint of the safetensors files that this engine loads, including a draft model's; empty if
    either is unknown.

    It is :meth:`kvplug.engine.Checkpoint.fingerprint`. Weights that are quantised while loading differ from
    the files, so the fingerprint includes the quantisation.
    """
    model, speculative = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
    draft = None if speculative is None else speculative.draft_model_config
    models = [model] if draft is None or draft is model else [model, draft]
    found = [_fingerprint_of(each, vllm_config.load_config) for each in models]
    return " and ".join(found) if all(found) else ""


def _fingerprint_of(model: ModelConfig, load: LoadConfig) -> str:
    if load.load_format not in _FORMATS:
        _log.info("load format %r of %s: kvplug reads safetensors files only", load.load_format, model.model)
        return ""
    folder = _folder_of(model.model_weights or model.model, model.revision, load.download_dir)
    files = _files_of(folder, load.load_format) if folder is not None else ()
    if not files:
        _log.info("found no safetensors files of %s", model.model)
        return ""
    try:
        return Checkpoint.fingerprint(files) + _quantised(model)
    except Exception as e:  # vLLM may still read them: do not end its engine
        _log.warning("the safetensors files of %s cannot be read: %s", model.model, e)
        return ""


def fingerprint_of_adapter(path: str) -> str:
    """The fingerprint of the LoRA adapter in this folder; unique to this process if its files cannot be read.

    A second call is cheap: it reads the files only if their times or sizes changed.
    """
    folder = _folder_of(str(Path(path).expanduser()), None, None)
    try:
        return (
            _unknown_adapter(path, "no such folder")
            if folder is None
            else Checkpoint.adapter_fingerprint(folder)
        )
    except Exception as e:
        return _unknown_adapter(path, str(e))


@functools.cache  # one warning
def _unknown_adapter(path: str, why: str) -> str:
    _log.warning(
        "the weights of the LoRA adapter %s are unknown (%s): only this process can load the KV of its"
        " requests. To share the KV, provide the adapter as PEFT's files: adapter_model.safetensors,"
        " adapter_config.json",
        path,
        why,
    )
    return f"{path} {os.urandom(16).hex()}"


def _quantised(model: ModelConfig) -> str:
    if model.quantization is None or model.model_arch_config.quantization_config is not None:
        return ""
    return f" quantised to {model.quantization}"


def _folder_of(model: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot_of(model, revision, cache)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


@functools.cache  # a failure is not cached: the model may be downloaded later
def _snapshot_of(model: str, revision: str | None, cache: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))


def _files_of(folder: Path, load_format: str) -> tuple[Path, ...]:
    """The files in the folder that vLLM reads: Mistral's format if present."""
    found: tuple[Path, ...] = ()
    if load_format in ("auto", "mistral"):
        found = Checkpoint.files(folder, consolidated=True)
    return found if found or load_format == "mistral" else Checkpoint.files(folder)
