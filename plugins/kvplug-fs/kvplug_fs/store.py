"""The store "fs": pages as files in a folder."""

from __future__ import annotations

from typing import Final

from kvplug.transport import BlockingStore, FolderStore
from kvplug_fs.options import FolderOptions

LAYOUT: Final = "v1"
"""Name of the inner folder. A version that arranges the files differently uses another name."""


def make_store(context: BlockingStore.Context) -> BlockingStore:
    """Raises ConfigError: ``path`` is not a folder, or other users can write to it."""
    options: FolderOptions = context.options
    return FolderStore(
        options.path,
        options.size,
        layout=LAYOUT,
        option="options.fs.path",
        num_threads=options.threads,
        sync=options.sync,
        touch_s=options.touch_s,
        rescan_s=options.rescan_s,
    )
