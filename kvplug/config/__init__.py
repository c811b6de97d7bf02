"""Configuration: a :class:`Config` from every source, and the options classes of plugins."""

from kvplug.config.config import KEYS, Config, Draft, describe_config
from kvplug.config.convert import format_value
from kvplug.config.options import UNIT, OptionRow, check_options, describe_options, option, option_fields
from kvplug.config.role import Role
from kvplug.config.sources import RESERVED, RESERVED_PREFIXES
from kvplug.config.units import parse_bytes, parse_seconds

__all__ = [
    "KEYS",
    "RESERVED",
    "RESERVED_PREFIXES",
    "UNIT",
    "Config",
    "Draft",
    "OptionRow",
    "Role",
    "check_options",
    "describe_config",
    "describe_options",
    "format_value",
    "option",
    "option_fields",
    "parse_bytes",
    "parse_seconds",
]
