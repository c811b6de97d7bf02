"""Fingerprints of checkpoints, so that engines do not mix the KV of different models with the same shapes."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_log = logging.getLogger(__name__)

_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "mistral", "instanttensor", "fastsafetensors", "runai_streamer"}
)
"""Load formats that read safetensors files."""
_OF_A_KIND = 256
"""How many tensors to sample for values among those whose names differ only in numbers. Name, dtype and
shape of all tensors are hashed.
"""
_ELEMENTS = 1 << 16
"""How many elements of a vector are hashed."""


def fingerprint_of(vllm_config: VllmConfig) -> str:
    """The fingerprint of the safetensors files that this engine loads; empty (not compared) for other
    formats.

    It is a hash over name, dtype and shape of every tensor and over two of its rows (for experts, rows of
    some of them). It does not depend on the names and the number of files, and differs for different weights.
    It takes milliseconds, or about a second for hundreds of files with tens of thousands of experts. Weights
    that are quantised while loading differ from the files, so the fingerprint includes the quantisation.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format not in _FORMATS:
        return ""
    folder = _folder_of(model.model_weights or model.model, model.revision, load.download_dir)
    files = _files_of(folder, load.load_format) if folder is not None else ()
    if not files:
        _log.info(
            "no safetensors files of %s are found: its weights are not compared with the peer's", model.model
        )
        return ""
    try:
        return _hash_of(files, _stamps(files)) + _quantised(model)
    except Exception as e:  # vLLM may still read them: do not end its engine
        _log.warning(
            "the safetensors files of %s have no fingerprint, and are not compared with the peer's: %s",
            model.model,
            e,
        )
        return ""


def fingerprint_of_adapter(path: str) -> str:
    """The fingerprint of the LoRA adapter in this folder; the path itself if its files cannot be read.

    A second call is cheap: it looks at the files' times and sizes, and reads them only if those changed.
    """
    folder = _folder_of(str(Path(path).expanduser()), None, None)
    if folder is None:
        return path
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    try:
        return f"{_hash_of((file,), _stamps((file,)))} {_scale_of(config, _stamps((config,)))}"
    except Exception as e:
        _log.debug("the adapter in %s has no fingerprint: %s", path, e)
        return path


@functools.lru_cache(maxsize=256)
def _scale_of(config: Path, _: tuple[tuple[int, int], ...]) -> str:
    """The scale of an adapter, from its config."""
    found = json.loads(config.read_text(encoding="utf-8"))
    return json.dumps([found.get(key) for key in ("r", "lora_alpha", "use_rslora")])


def _stamps(files: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """Times and sizes of the files, which change when a file is written again."""
    stats = (file.stat() for file in files)
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


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
    """The files in the folder that vLLM reads: Mistral's format if present; only files in the index.

    A folder may also contain another copy of the model, an adapter, or files of an older revision.
    """
    found: tuple[Path, ...] = ()
    index = "consolidated.safetensors.index.json"
    if load_format in ("auto", "mistral"):
        found = tuple(sorted(folder.glob("consolidated*.safetensors")))
    if not found and load_format != "mistral":
        found, index = tuple(sorted(folder.glob("*.safetensors"))), "model.safetensors.index.json"
    try:
        named = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError):  # a model in one file has no index
        return found
    return tuple(file for file in found if file.name in named)


@functools.lru_cache(maxsize=256)
def _hash_of(files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> str:
    kinds = {name: (file, kind) for file in files for name, kind in _kinds(file)}
    chosen: dict[Path, list[str]] = defaultdict(list)
    for name in _chosen(kinds):
        chosen[kinds[name][0]].append(name)
    values = {name: value for file, names in chosen.items() for name, value in _values(file, names)}
    digest = hashlib.blake2b(digest_size=16)
    for name, (_file, kind) in sorted(kinds.items()):
        digest.update(f"{name} {kind} ".encode())
        digest.update(values.get(name, b""))
    return f"safetensors:{digest.hexdigest()}"


def _chosen(names: Iterable[str]) -> Iterator[str]:
    """All names; if there are more than :data:`_OF_A_KIND` of one kind, that many, evenly spread."""
    of_a_kind: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        of_a_kind[re.sub(r"\d+", "0", name)].append(name)
    for alike in of_a_kind.values():
        step = max(1, len(alike) / _OF_A_KIND)
        yield from (alike[int(at * step)] for at in range(min(len(alike), _OF_A_KIND)))


def _kinds(file: Path) -> Iterator[tuple[str, str]]:
    """Name, dtype and shape of every tensor, from the file's header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: Mapping[str, Any] = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, f"{tensor['dtype']} {tensor['shape']}"


def _values(file: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """A hash of each of these tensors: of its first row and of its middle row."""
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        for name in names:
            tensor = tensors.get_slice(name)
            shape = tensor.get_shape()
            if 0 in shape:
                continue
            if not shape:
                rows = [tensors.get_tensor(name)]
            elif len(shape) == 1:
                rows = [tensor[:_ELEMENTS]]
            else:
                middle = tuple(slice(size // 2, size // 2 + 1) for size in shape[:-1])
                rows = [tensor[tuple(slice(1) for _ in shape[:-1])], tensor[middle]]
            data = b"".join(row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in rows)
            yield name, hashlib.blake2b(data, digest_size=16).digest()
