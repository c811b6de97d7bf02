"""vLLM's base class of connectors and its companion classes, after a check that the adapter can use them.

The adapter imports them from here, so that an unsupported release is refused with an explanation, not with an
``ImportError``.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

from kvplug import UnsupportedError

TRIED = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""The releases that this adapter is tested with, oldest first. Used in messages only."""

_CLASSES = (
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
)
_METHODS = (
    "bind_gpu_block_pool",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "has_pending_push_work",
    "on_new_request",
    "requires_kv_delivery",
    "reset_cache",
    "set_xfer_handshake_metadata_pp_aware",
)
"""Methods that the adapter relies on vLLM to call. A release whose base class lacks one never calls it, and
the adapter would fail silently: KV of a failed load would be used, or blocks would never be freed.
"""
_KNOWN = """
    bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta
    build_connector_worker_meta build_kv_connector_stats build_prom_metrics clear_connector_metadata
    finish_forward get_block_ids_with_load_errors get_external_cache_hit_sources get_finished
    get_finished_count get_handshake_metadata get_kv_connector_kv_cache_events get_kv_connector_stats
    get_loaded_kv_cache_group_ids get_mem_pool_context get_num_new_matched_tokens
    get_required_kvcache_layout get_transfer_results handle_preemptions has_connector_metadata
    has_pending_block_frees has_pending_push_work on_new_request prefer_cross_layer_blocks
    register_cross_layers_kv_cache register_finished_partial_tail register_kv_caches request_finished
    request_finished_all_groups requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
    reset_capture_state restore_kv_caches role save_kv_layer set_host_xfer_buffer_ops
    set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware shutdown start_load_kv
    supports_divergent_local_hybrid_hits supports_sleep_mode take_events unregister_kv_caches
    update_connector_output update_state_after_alloc wait_for_layer_load wait_for_save
"""
"""The public names of the base class in releases 0.27.1 to 0.33.0."""


def supported() -> str:
    """The releases that the adapter supports, for messages."""
    return f"kvplug-vllm is tested with vLLM {', '.join(TRIED)}"


def require(module: ModuleType | Any, version: str) -> None:
    """Check what the adapter needs of vLLM's module ``base``.

    Raises:
        UnsupportedError: it lacks classes or methods, or its constructor takes other arguments. The message
            names them, the release, and the releases that are supported.
    """
    base = getattr(module, "KVConnectorBase_V1", None)
    missing = [name for name in _CLASSES if not hasattr(module, name)]
    if base is None:
        missing.insert(0, "KVConnectorBase_V1")
    else:
        missing += [f"KVConnectorBase_V1.{name}" for name in _METHODS if not hasattr(base, name)]
        parameters = list(inspect.signature(base.__init__).parameters)
        wanted = ["self", "vllm_config", "role", "kv_cache_config"]
        if parameters != wanted:
            missing.append(f"KVConnectorBase_V1({', '.join(wanted[1:])}), but ({', '.join(parameters[1:])})")
    if missing:
        raise UnsupportedError(
            f"kvplug-vllm does not know the connector API of vLLM {version}: it has no"
            f" {'; no '.join(missing)}. {supported()}: install one of them, or a newer kvplug-vllm"
        )


def unknown_names(base: type) -> list[str]:
    """Public names of vLLM's base class that no known release has. They may be new calls to implement."""
    return sorted(name for name in vars(base) if not name.startswith("_") and name not in _KNOWN.split())


def require_implemented(connector: type) -> None:
    """Check that the adapter's class implements all abstract methods of vLLM's base class.

    Raises:
        UnsupportedError: it does not; the message names the methods.
    """
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        raise UnsupportedError(
            f"the connector API of vLLM {vllm.__version__} requires {', '.join(missing)}, which kvplug-vllm"
            f" does not implement. {supported()}: install one of them, or a newer kvplug-vllm"
        )


def fails_by_request(module: ModuleType | Any) -> bool:
    """Whether vLLM accepts failed loads by request, as a model with several KV cache groups requires.

    True since 0.30. Otherwise the adapter declares no support for several groups, and vLLM merges them.
    """
    results = getattr(module, "KVConnectorTransferResults", None)
    return hasattr(module, "SupportsHMA") and "failed_recving" in getattr(results, "__dataclass_fields__", ())


def fails_where_reset_fails() -> bool:
    """Whether an operation for which vLLM clears its caches, such as ``POST /pause``, fails if a connector
    refuses to. True since 0.31; before, vLLM ignores the refusal."""
    from vllm.v1.engine.core import EngineCore

    return "raise" in inspect.getsource(EngineCore._reset_caches)


require(_base, vllm.__version__)
KVConnectorBase_V1 = _base.KVConnectorBase_V1
KVConnectorHandshakeMetadata = _base.KVConnectorHandshakeMetadata
KVConnectorMetadata = _base.KVConnectorMetadata
KVConnectorRole = _base.KVConnectorRole
KVConnectorWorkerMetadata = _base.KVConnectorWorkerMetadata
FAILS_BY_REQUEST = fails_by_request(_base)
SUPPORTS_GROUPS: tuple[type, ...] = (_base.SupportsHMA,) if FAILS_BY_REQUEST else ()
"""Further base classes of a connector. vLLM uses several KV cache groups only with this one."""


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """The result of ``get_transfer_results``, which vLLM calls since 0.30."""
    return _base.KVConnectorTransferResults(
        finished_sending=sent, finished_recving=received, failed_recving=failed
    )
