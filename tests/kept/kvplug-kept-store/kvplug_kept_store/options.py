"""Options: everything ``kvplug list`` needs beside the plugin's own module."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class KeptOptions:
    """Options of the store "kept-store"."""

    path: str = option(
        help="Folder of the database; created if it is missing. All processes that name it share its pages."
    )
    size: int = option(
        default=1024**3, unit="bytes", at_least=1, help="Bytes that all pages together may use."
    )
