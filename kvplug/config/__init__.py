"""Configuration: a :class:`Config` from every source, and the options classes of plugins."""

from kvplug.config.config import KEYS, Config, Draft, Role, describe_config, json_schema
from kvplug.config.options import (
    UNIT,
    OptionRow,
    check_options,
    describe_options,
    format_value,
    option,
    option_fields,
)
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
    "json_schema",
    "option",
    "option_fields",
    "parse_bytes",
    "parse_seconds",
]
