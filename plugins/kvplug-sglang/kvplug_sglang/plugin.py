"""The function of SGLang's plugin entry point, which SGLang calls in each of its processes.

It makes ``--hicache-storage-backend kvplug`` work, and notifies the storage when the weights change. SGLang's
hooks for its functions and methods are the only way to do either.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from typing import Any, Final

from kvplug import UnsupportedError

NAME: Final = "kvplug"
"""The value of ``--hicache-storage-backend``."""
DYNAMIC: Final = {
    "backend_name": NAME,
    "module_path": "kvplug_sglang.storage",
    "class_name": "KvplugStorage",
}
"""The extra config that SGLang's backend ``dynamic`` needs."""
_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_CONTROLLER: Final = "sglang.srt.managers.cache_controller.HiCacheController"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES: Final = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""SGLang's methods that change the weights."""
_registered: list[str] = []
"""Targets of the scheduler's hooks that were registered in this process."""


def register() -> None:
    """Register the hooks. SGLang applies them after it has called all plugins.

    The scheduler's hooks are registered only if its module is imported, since the import takes seconds.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _offer_name, HookType.AFTER)
    if _SCHEDULER not in sys.modules:
        return
    hooks = [
        (f"{_CONTROLLER}.attach_storage_backend", _attach, HookType.AROUND),
        (f"{_CONTROLLER}.reset", _cache_was_reset, HookType.AFTER),
        *((f"{_UPDATER}.{name}", _weights_change, HookType.AROUND) for name in UPDATES),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
        _registered.append(target)


def check_hooks() -> None:
    """Check that SGLang applied the hooks. It only logs a failure, and then KV of old weights stays valid.

    Raises:
        UnsupportedError: a registered hook was not applied; the message names its target.
    """
    missing = [target for target in _registered if not _is_hooked(target)]
    if missing:
        raise UnsupportedError(
            f"SGLang has no {', '.join(missing)}, or its hooks do not work: kvplug would not learn that the"
            " weights change. Install a release of SGLang that kvplug-sglang supports, or a newer"
            " kvplug-sglang"
        )


def _is_hooked(target: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")  # set by SGLang's wrapper
    except (ImportError, AttributeError):
        return False


def _offer_name(result: object, parser: Any) -> None:
    """Make the command line accept the name: argparse knows only SGLang's own backends."""
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and NAME not in (action.choices or (NAME,)):
            action.choices = [*action.choices, NAME]


def _attach(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach ``kvplug`` as the backend ``dynamic`` with kvplug's class: other names are SGLang's own."""
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments.get("storage_backend") != NAME:
        return original(*args, **kwargs)
    given = call.arguments.get("storage_backend_extra_config") or {}
    call.arguments["storage_backend"] = "dynamic"
    call.arguments["storage_backend_extra_config"] = {**given, **DYNAMIC}
    result = original(*call.args, **call.kwargs)
    controller = call.args[0]
    controller.storage_backend_type = NAME
    return result


def _storages() -> list[Any]:
    """The storages of this process, if it has any."""
    module = sys.modules.get(DYNAMIC["module_path"])
    return [] if module is None else list(module.LIVE)


def _weights_change(original: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    for storage in _storages():
        storage.names.begin_weights(getattr(request, "model_path", None))
    result = original(updater, request, *args, **kwargs)
    for storage in _storages():
        storage.names.end_weights(bool(getattr(result, "success", False)))
    return result


def _cache_was_reset(result: object, *args: Any, **kwargs: Any) -> None:
    for storage in _storages():
        storage.names.cache_was_reset()
