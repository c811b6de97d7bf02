"""Options: everything ``kvplug list`` needs beside the plugin's own module. No torch here."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class ShelfOptions:
    """Options of the connector "shelf"."""

    folder: str = option(
        default="",
        help="Where KV is kept; both engines must see it. Empty: one of this user's among temporary files.",
    )
