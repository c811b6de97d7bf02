"""Plugins found, loaded one by one, and resolved by name; one that is broken stops no other."""

from kvplug.assembly.registry.check import CHOSEN, name_faults, option_faults, own_part
from kvplug.assembly.registry.registry import PluginInfo, PluginStatus, Registry

__all__ = ["CHOSEN", "PluginInfo", "PluginStatus", "Registry", "name_faults", "option_faults", "own_part"]
