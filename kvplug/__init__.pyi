# The public names of this package and the modules that define them. Read by type checkers and kvplug.door.
__version__: str

from kvplug.assembly.builders import (
    build_communicator as build_communicator,
    build_lookup as build_lookup,
    build_page_cache as build_page_cache,
    build_queue as build_queue,
    worker_transports as worker_transports,
)
from kvplug.assembly.connector import (
    ConnectorInfo as ConnectorInfo,
    build_connector as build_connector,
    check_config as check_config,
)
from kvplug.assembly.pipes import (
    build_pipe_endpoint as build_pipe_endpoint,
    connect_pipe as connect_pipe,
    listen_pipe as listen_pipe,
)
from kvplug.assembly.registry import (
    Registry as Registry,
)
from kvplug.assembly.stores import (
    build_store as build_store,
)
from kvplug.cli.duration import (
    Duration as Duration,
)
from kvplug.config.config import (
    Config as Config,
)
from kvplug.errors import (
    AuthenticationError as AuthenticationError,
    CapacityError as CapacityError,
    ClosedError as ClosedError,
    ConfigError as ConfigError,
    HandshakeError as HandshakeError,
    IntegrityError as IntegrityError,
    KvplugError as KvplugError,
    PeerGoneError as PeerGoneError,
    PluginError as PluginError,
    ResourceExhaustedError as ResourceExhaustedError,
    TimeoutError as TimeoutError,
    TransportError as TransportError,
    UnsupportedError as UnsupportedError,
)
from kvplug.transport.group.group import (
    StatelessGroup as StatelessGroup,
)
from kvplug.transport.group.mesh import (
    connect_ranks as connect_ranks,
)
