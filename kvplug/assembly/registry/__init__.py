"""Plugins: discovered, loaded one by one, and resolved by name. A broken plugin does not affect others."""

from kvplug.assembly.registry.registry import PluginInfo, PluginStatus, Registry

__all__ = [
    "PluginInfo",
    "PluginStatus",
    "Registry",
]
