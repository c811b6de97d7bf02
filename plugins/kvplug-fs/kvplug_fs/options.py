"""Options of the store "fs"."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class FolderOptions:
    """Options of the store "fs"."""

    path: str = option(
        help="Folder of the pages; created if it is missing. All processes that name it share its pages."
    )
    size: int = option(
        default=16 * 1024**3,
        unit="bytes",
        at_least=1,
        help="Bytes that the pages may use on the disk, in whole blocks with headers. Processes that"
        " share the folder should give the same size.",
    )
    threads: int = option(default=4, at_least=1, help="How many pages are read and written at the same time.")
    sync: bool = option(
        default=False,
        help="Wait for the disk after each page. Without it, a crash of the host may lose the newest pages;"
        " incomplete ones are found and removed.",
    )
    touch_s: float = option(
        default=1.0,
        unit="seconds",
        at_least=0,
        help="A read is recorded as a use of its page if the last recorded use is older than this.",
    )
    rescan_s: float = option(
        default=300.0,
        unit="seconds",
        above=0,
        help="How often the folder is searched for changes by other programs.",
    )
