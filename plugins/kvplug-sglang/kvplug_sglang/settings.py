"""The extra config of a HiCache storage backend as a kvplug config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvplug import Config, ConfigError

SOURCE: Final = "--hicache-storage-backend-extra-config"
TIMEOUT_S: Final = 5.0
"""Deadline of a call if the config sets no ``timeout_s``. Requests may wait for a prefetch, and computing is
faster than a load that takes longer."""
_OF_SGLANG: Final = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "file_storage_path",
)
"""Keys that SGLang reads itself, and leaves in the config that it passes to a backend."""


def config_of(given: Mapping[str, Any] | None, *, metrics: bool = False, split: object = None) -> Config:
    """The config in the extra config that SGLang was started with.

    Args:
        metrics: SGLang exports metrics: they include kvplug's, if the config names no sinks.
        split: SGLang's ``tp_lcm_size``, which it has removed from the extra config.

    Raises:
        ConfigError: a key is not kvplug's, or a value is wrong; lists every fault of form.
    """
    own = {key: value for key, value in (given or {}).items() if key not in _OF_SGLANG}
    own.setdefault("timeout_s", TIMEOUT_S)
    if metrics:
        own.setdefault("sinks", ["prometheus"])
    if split is not None:
        raise ConfigError(
            f"tp_lcm_size: {split!r} was given, but kvplug separates the pages of each tensor-parallel size:"
            " remove the key",
            source=SOURCE,
        )
    return Config.from_dict(own, SOURCE)
