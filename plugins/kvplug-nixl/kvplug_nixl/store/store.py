"""The store "nixl": over a folder or over a bucket."""

from __future__ import annotations

from kvplug import ConfigError
from kvplug.transport import BlockingStore
from kvplug_nixl.library import nixl
from kvplug_nixl.probe import INSTALL, has_backend
from kvplug_nixl.store.files import FileStore
from kvplug_nixl.store.objects import ObjectStore
from kvplug_nixl.store.options import NixlStoreOptions


def make_store(context: BlockingStore.Context) -> BlockingStore:
    """The store that the options ask for.

    Raises:
        ConfigError: neither ``path`` nor ``bucket`` was given, or both, or one of the others is wrong,
            or others can write to the folder.
        TransportError: NIXL cannot be loaded, and why.
    """
    options: NixlStoreOptions = context.options
    if (options.path is None) == (options.bucket is None):
        given = "nothing was" if options.path is None else "path and bucket were"
        raise ConfigError(
            f"options.nixl: {given} given; give path for files in a folder, or bucket for objects in S3"
        )
    backend = "OBJ" if options.path is None else "POSIX"
    if not has_backend(backend):
        raise ConfigError(f"options.nixl: NIXL's plugin {backend} is not installed: {INSTALL}")
    if options.path is None and options.size is not None:
        raise ConfigError("options.nixl.size: a bucket has no bound here; give it a lifecycle rule")
    with nixl({}):
        pass  # loaded now: that takes seconds, which the deadline of the first request does not cover
    return ObjectStore(options) if options.path is None else FileStore(options)
