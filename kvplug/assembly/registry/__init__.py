"""Plugins: discovered, loaded one by one, and resolved by name. A broken plugin does not affect others."""

from kvplug.assembly.registry.check import CHECKED, CHOSEN, NAMED, name_faults, option_faults, own_part
from kvplug.assembly.registry.packages import how_to_install
from kvplug.assembly.registry.registry import PluginInfo, PluginStatus, Registry

__all__ = [
    "CHECKED",
    "CHOSEN",
    "NAMED",
    "PluginInfo",
    "PluginStatus",
    "Registry",
    "how_to_install",
    "name_faults",
    "option_faults",
    "own_part",
]
