"""The facts that the KV in SGLang's pages depends on, besides tokens.

SGLang names a page by a hash of its tokens, adapter and cache salt, which does not include these facts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplug.engine import Checkpoint, ModelInfo
from kvplug_sglang.pools import HostPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

_log = logging.getLogger(__name__)

_VERSION: Final = 1
"""Version of these facts. Pages that were stored with another version are misses."""
_FORMATS: Final = frozenset(
    {"auto", "safetensors", "mistral", "instanttensor", "layered", "fastsafetensors", "runai_streamer"}
)
"""Load formats that read safetensors files."""


def model_facts(path: str | None = None) -> dict[str, Any]:
    """Facts about the model that this process serves. ``weights`` is empty if the weights of the model, its
    draft or an adapter have no fingerprint.

    Args:
        path: the checkpoint of the weights; by default the one that the engine was started with.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    config = ModelConfig.from_server_args(args)
    name = path or config.model_path
    found = fingerprint_of(name, config.revision, args.load_format, args.download_dir)
    draft, adapters = _draft_of(args), sorted(map(adapter_of, args.lora_paths or ()))
    return {
        "weights": found if all((found, *draft[2:], *(each[2] for each in adapters))) else "",
        "quantization": [config.quantization, args.quantization, _content_of(args.quantization_param_path)],
        "dtype": str(config.dtype),
        "positions": _positions(config),
        "window": config.sliding_window_size,
        "overrides": args.json_model_override_args,
        "draft": [args.speculative_algorithm, *draft],
        "adapters": [" ".join(each) for each in adapters],
    }


def rank_facts(config: HiCacheStorageConfig, *, is_replicated: bool) -> dict[str, Any]:
    """The part of the model that this worker has.

    ``is_replicated``: every tensor-parallel rank has the same part.
    """
    return {
        "tensor": None if is_replicated else [config.tp_rank, config.tp_size],
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size],
        "decode_context": [config.dcp_rank, config.dcp_size],
    }


def pool_facts(pool: HostPool) -> dict[str, Any]:
    """The layout of a pool's pages."""
    inner = pool.pool
    shape = {name: _plain(getattr(inner, name, None)) for name in _SHAPE}
    return {"name": pool.name, "class": type(inner).__name__, "sizes": list(pool.sizes), **shape}


_SHAPE: Final = (
    "layout",
    "dtype",
    "page_size",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)
"""Attributes of pools. Not every pool has all of them."""


def namespace_of(*facts: Mapping[str, Any]) -> bytes:
    """32 bytes that are equal exactly for equal facts."""
    text = json.dumps([_VERSION, *facts], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"kvplug sglang").digest()


def fingerprint_of(name: str, revision: str | None, load_format: str, cache: str | None) -> str:
    """The fingerprint of a model's safetensors files; empty if there are none.

    Args:
        name: a folder, or a name on the hub, whose files are searched in the cache.
    """
    folder = _folder_of(name, revision, cache) if str(load_format) in _FORMATS else None
    if folder is None:
        return ""
    try:
        files = Checkpoint.files(folder, consolidated=load_format == "mistral")
        return Checkpoint.fingerprint(files) if files else ""
    except (OSError, ValueError) as e:  # SGLang may still read them: do not end its engine
        _log.warning("the safetensors files of %s have no fingerprint: %s", name, e)
        return ""


def _folder_of(name: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _draft_of(args: Any) -> tuple[Any, ...]:
    name = args.speculative_draft_model_path
    if name is None:
        return ()
    revision = args.speculative_draft_model_revision
    return name, revision, fingerprint_of(name, revision, args.load_format, args.download_dir)


def adapter_of(adapter: Any) -> tuple[str, str, str]:
    """Name, path and fingerprint of an adapter that the engine was started with. SGLang identifies it by name
    and path, not by its weights. An adapter that is loaded later has a random id, so that no other process
    finds its pages."""
    path = getattr(adapter, "lora_path", None) or str(adapter)
    folder = _folder_of(str(Path(path).expanduser()), None, None)
    try:
        found = "" if folder is None else Checkpoint.adapter_fingerprint(folder)
    except (OSError, ValueError) as e:
        _log.warning("the adapter %s has no fingerprint: %s", path, e)
        found = ""
    return str(getattr(adapter, "lora_name", "")), path, found


def _positions(config: Any) -> str:
    """The language model's position embedding. Some factors depend on the longest served context."""
    found = ModelInfo.positions_of(config.hf_text_config)
    return f"{found} up to {config.context_len}" if "longrope" in found else found


def _content_of(path: str | None) -> str | None:
    """A hash of a file of static scales."""
    if path is None:
        return None
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int) else str(value)
