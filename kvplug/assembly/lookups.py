"""Config + Registry -> a lookup buffer's endpoint."""

from __future__ import annotations

from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config import Config
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.lookup import LookupEndpoint


@NamedExhaustion("building a lookup buffer")
def build_lookup(config: Config, *, registry: Registry | None = None) -> LookupEndpoint:
    """The endpoint of the lookup buffer that the config's ``lookup_buffer`` names. It makes the ends.

    ``hold`` makes a store of the config's ``buffer_size``; ``reach`` makes an end that uses another process's
    store over two pipes.

    Raises:
        ConfigError: the options are wrong; every fault at once.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: none is installed for "auto", or the factory returned something else.
        ResourceExhaustedError: the process has no free descriptor or memory for it.
    """
    resolved = ResolvedConfig.to_build(config, registry)
    resolved.check(keys=("lookup_buffer",))
    return resolved.lookup_endpoint()
