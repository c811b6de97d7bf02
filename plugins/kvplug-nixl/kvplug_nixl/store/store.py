"""The store "nixl": pages in a folder or in a bucket."""

from __future__ import annotations

from kvplug import ConfigError
from kvplug.transport import BlockingStore
from kvplug_nixl.library import nixl
from kvplug_nixl.probe import INSTALL, has_backend
from kvplug_nixl.store.files import FileStore
from kvplug_nixl.store.objects import ObjectStore
from kvplug_nixl.store.options import NixlStoreOptions


def make_store(context: BlockingStore.Context) -> BlockingStore:
    """Return the store that the options ask for.

    Raises:
        ConfigError: neither ``path`` nor ``bucket`` was given, or both; another option is wrong; or other
            users can write to the folder.
        TransportError: NIXL cannot be loaded.
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
        raise ConfigError("options.nixl.size: the store cannot bound a bucket; give it a lifecycle rule")
    with nixl({}):
        pass  # loading takes seconds, which would count against the first request's deadline
    return ObjectStore(options) if options.path is None else FileStore(options)
