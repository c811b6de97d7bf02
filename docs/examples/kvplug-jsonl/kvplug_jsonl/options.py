"""Options: everything ``kvplug list`` needs beside the plugin's own module."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class JsonlOptions:
    """Options of the sink "jsonl"."""

    path: str = option(help="File to append to; created if it is missing. Several processes may share it.")
