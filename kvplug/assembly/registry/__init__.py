"""Plugins: discovered, loaded one by one, and resolved by name. A broken plugin does not affect others."""

from kvplug.assembly.registry.discovery import PluginInfo, PluginStatus
from kvplug.assembly.registry.registry import Registry

__all__ = [
    "PluginInfo",
    "PluginStatus",
    "Registry",
]
