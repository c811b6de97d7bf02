"""kvplug: the socket between LLM engines and KV cache transports.

Everything public is here, and imported when it is first asked for: ``import kvplug`` costs nothing, and
``from kvplug import Config`` loads what Config needs and no more.
"""

__version__ = "0.1.0"

_HOMES = {
    "kvplug.errors": (
        "AddressInUseError",
        "AmbiguousNameError",
        "AuthenticationError",
        "BusyError",
        "CancelledError",
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "EntryGoneError",
        "HandshakeError",
        "InsecureAddressError",
        "IntegrityError",
        "KvplugError",
        "LayoutError",
        "LentError",
        "PeerGoneError",
        "PluginError",
        "PluginLoadError",
        "TensorMismatchError",
        "TimeoutError",
        "TransportError",
        "UnknownConnectorError",
        "UnknownNameError",
        "UnknownTransportError",
        "UnsupportedError",
        "WireError",
    ),
    "kvplug.deadline": (
        "DEFAULT_TIMEOUT",
        "Deadline",
        "Timeout",
    ),
    "kvplug.fate": ("Fate",),
    "kvplug.fork": ("close_after_fork",),
    "kvplug.capabilities": (
        "Capabilities",
        "Cost",
        "Requirements",
    ),
    "kvplug.config": (
        "Config",
        "OptionRow",
        "Role",
        "check_options",
        "describe_options",
        "option",
    ),
    "kvplug.model": (
        "ModelInfo",
        "positions_of",
    ),
    "kvplug.layout": (
        "KVLayout",
        "blocks_of",
        "gather",
        "permute",
        "scatter",
        "slots",
        "spans",
        "views",
    ),
    "kvplug.checksum": (
        "digest",
        "verify",
    ),
    "kvplug.pipe": (
        "Blocks",
        "Pipe",
        "PipeEndpoint",
        "PipeListener",
        "Transfer",
        "Turn",
    ),
    "kvplug.acceptor": (
        "Acceptor",
        "PipeAcceptor",
    ),
    "kvplug.queue": (
        "MessageQueue",
        "QueueEndpoint",
        "QueueHandle",
        "Reader",
        "Wait",
    ),
    "kvplug.communicator": (
        "All2AllManager",
        "DeviceCommunicator",
        "RecvOp",
        "SendOp",
        "TokenSplit",
    ),
    "kvplug.lookup": (
        "Entry",
        "EntryHeader",
        "EntrySink",
        "LookupBuffer",
        "LookupEndpoint",
        "LookupStore",
    ),
    "kvplug.spec": (
        "CommandSpec",
        "ConnectorSpec",
        "Kind",
        "Probe",
        "SinkSpec",
        "TransportSpec",
    ),
    "kvplug.select": (
        "Candidate",
        "Offer",
        "Selection",
    ),
    "kvplug.lease": (
        "Lease",
        "Leases",
    ),
    "kvplug.events": (
        "EventLog",
        "Follower",
        "Removed",
        "RemovalReason",
        "Snapshot",
        "StoreEvent",
        "Stored",
        "event_from_plain",
        "event_to_plain",
        "pack_tokens",
        "unpack_tokens",
    ),
    "kvplug.liveness": (
        "Heartbeat",
        "Watch",
        "watch",
    ),
    "kvplug.streams": (
        "lend_stream",
        "take_back_stream",
    ),
    "kvplug.trust.addresses": ("local_domain",),
    "kvplug.trust.channel": ("Channel",),
    "kvplug.trust.connection": (
        "Connection",
        "dial",
        "dial_until",
    ),
    "kvplug.trust.credentials": (
        "Credentials",
        "Secret",
    ),
    "kvplug.trust.identity": (
        "PeerIdentity",
        "this_process",
    ),
    "kvplug.trust.listener": ("Listener",),
    "kvplug.handshake.agreement": (
        "Agreement",
        "agree",
    ),
    "kvplug.handshake.hello": ("Hello",),
    "kvplug.group.group": ("StatelessGroup",),
    "kvplug.group.over": ("group_from_process_group",),
    "kvplug.group.mesh": ("Mesh",),
    "kvplug.group.pipes": ("connect_ranks",),
    "kvplug.metrics.reasons": ("reason_of",),
    "kvplug.metrics.stats": ("TransferStats",),
    "kvplug.metrics.sinks": (
        "HookSink",
        "LogSink",
        "Sink",
    ),
    "kvplug.metrics.prometheus": ("prometheus_sinks",),
    "kvplug.connector.scheduler": ("SchedulerConnector",),
    "kvplug.connector.worker": ("WorkerConnector",),
    "kvplug.connector.values": (
        "BlockIds",
        "BlocksRemoved",
        "BlocksStored",
        "CacheEvent",
        "CacheGroup",
        "CopyBlocks",
        "KVCacheConfig",
        "Parallelism",
        "Plain",
        "Request",
        "RequestEnd",
        "ScheduledRequest",
        "SchedulerOutput",
        "Side",
        "WorkerOutput",
    ),
    "kvplug.context": (
        "CommunicatorContext",
        "ConnectorContext",
        "LookupContext",
        "PeerLink",
        "PeerListener",
        "Peers",
        "PipeContext",
        "QueueContext",
    ),
    "kvplug.hookspecs": (
        "PLUGIN_API",
        "hookimpl",
    ),
    "kvplug.registry": (
        "PluginInfo",
        "Registry",
    ),
    "kvplug.build": (
        "PipeServer",
        "build_communicator",
        "build_connector",
        "build_queue",
        "check_config",
        "connect_pipe",
        "connector_class",
        "lacks_pipe",
        "listen_pipe",
        "required_layout",
    ),
}
"""Each module, and what the front door shows of it."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    """Import a public name's module (PEP 562), and remember the name."""
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kvplug' has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


TYPE_CHECKING = False  # as type checkers know it, without importing typing
if TYPE_CHECKING:
    from kvplug.acceptor import (
        Acceptor as Acceptor,
        PipeAcceptor as PipeAcceptor,
    )
    from kvplug.build import (
        PipeServer as PipeServer,
        build_communicator as build_communicator,
        build_connector as build_connector,
        build_queue as build_queue,
        check_config as check_config,
        connect_pipe as connect_pipe,
        connector_class as connector_class,
        lacks_pipe as lacks_pipe,
        listen_pipe as listen_pipe,
        required_layout as required_layout,
    )
    from kvplug.capabilities import (
        Capabilities as Capabilities,
        Cost as Cost,
        Requirements as Requirements,
    )
    from kvplug.checksum import (
        digest as digest,
        verify as verify,
    )
    from kvplug.communicator import (
        All2AllManager as All2AllManager,
        DeviceCommunicator as DeviceCommunicator,
        RecvOp as RecvOp,
        SendOp as SendOp,
        TokenSplit as TokenSplit,
    )
    from kvplug.config import (
        Config as Config,
        OptionRow as OptionRow,
        Role as Role,
        check_options as check_options,
        describe_options as describe_options,
        option as option,
    )
    from kvplug.connector.scheduler import (
        SchedulerConnector as SchedulerConnector,
    )
    from kvplug.connector.values import (
        BlockIds as BlockIds,
        BlocksRemoved as BlocksRemoved,
        BlocksStored as BlocksStored,
        CacheEvent as CacheEvent,
        CacheGroup as CacheGroup,
        CopyBlocks as CopyBlocks,
        KVCacheConfig as KVCacheConfig,
        Parallelism as Parallelism,
        Plain as Plain,
        Request as Request,
        RequestEnd as RequestEnd,
        ScheduledRequest as ScheduledRequest,
        SchedulerOutput as SchedulerOutput,
        Side as Side,
        WorkerOutput as WorkerOutput,
    )
    from kvplug.connector.worker import (
        WorkerConnector as WorkerConnector,
    )
    from kvplug.context import (
        CommunicatorContext as CommunicatorContext,
        ConnectorContext as ConnectorContext,
        LookupContext as LookupContext,
        PeerLink as PeerLink,
        PeerListener as PeerListener,
        Peers as Peers,
        PipeContext as PipeContext,
        QueueContext as QueueContext,
    )
    from kvplug.deadline import (
        DEFAULT_TIMEOUT as DEFAULT_TIMEOUT,
        Deadline as Deadline,
        Timeout as Timeout,
    )
    from kvplug.errors import (
        AddressInUseError as AddressInUseError,
        AmbiguousNameError as AmbiguousNameError,
        AuthenticationError as AuthenticationError,
        BusyError as BusyError,
        CancelledError as CancelledError,
        CapacityError as CapacityError,
        ClosedError as ClosedError,
        ConfigError as ConfigError,
        EntryGoneError as EntryGoneError,
        HandshakeError as HandshakeError,
        InsecureAddressError as InsecureAddressError,
        IntegrityError as IntegrityError,
        KvplugError as KvplugError,
        LayoutError as LayoutError,
        LentError as LentError,
        PeerGoneError as PeerGoneError,
        PluginError as PluginError,
        PluginLoadError as PluginLoadError,
        TensorMismatchError as TensorMismatchError,
        TimeoutError as TimeoutError,
        TransportError as TransportError,
        UnknownConnectorError as UnknownConnectorError,
        UnknownNameError as UnknownNameError,
        UnknownTransportError as UnknownTransportError,
        UnsupportedError as UnsupportedError,
        WireError as WireError,
    )
    from kvplug.events import (
        EventLog as EventLog,
        Follower as Follower,
        RemovalReason as RemovalReason,
        Removed as Removed,
        Snapshot as Snapshot,
        Stored as Stored,
        StoreEvent as StoreEvent,
        event_from_plain as event_from_plain,
        event_to_plain as event_to_plain,
        pack_tokens as pack_tokens,
        unpack_tokens as unpack_tokens,
    )
    from kvplug.fate import (
        Fate as Fate,
    )
    from kvplug.fork import (
        close_after_fork as close_after_fork,
    )
    from kvplug.group.group import (
        StatelessGroup as StatelessGroup,
    )
    from kvplug.group.mesh import (
        Mesh as Mesh,
    )
    from kvplug.group.over import (
        group_from_process_group as group_from_process_group,
    )
    from kvplug.group.pipes import (
        connect_ranks as connect_ranks,
    )
    from kvplug.handshake.agreement import (
        Agreement as Agreement,
        agree as agree,
    )
    from kvplug.handshake.hello import (
        Hello as Hello,
    )
    from kvplug.hookspecs import (
        PLUGIN_API as PLUGIN_API,
        hookimpl as hookimpl,
    )
    from kvplug.layout import (
        KVLayout as KVLayout,
        blocks_of as blocks_of,
        gather as gather,
        permute as permute,
        scatter as scatter,
        slots as slots,
        spans as spans,
        views as views,
    )
    from kvplug.lease import (
        Lease as Lease,
        Leases as Leases,
    )
    from kvplug.liveness import (
        Heartbeat as Heartbeat,
        Watch as Watch,
        watch as watch,
    )
    from kvplug.lookup import (
        Entry as Entry,
        EntryHeader as EntryHeader,
        EntrySink as EntrySink,
        LookupBuffer as LookupBuffer,
        LookupEndpoint as LookupEndpoint,
        LookupStore as LookupStore,
    )
    from kvplug.metrics.prometheus import (
        prometheus_sinks as prometheus_sinks,
    )
    from kvplug.metrics.reasons import (
        reason_of as reason_of,
    )
    from kvplug.metrics.sinks import (
        HookSink as HookSink,
        LogSink as LogSink,
        Sink as Sink,
    )
    from kvplug.metrics.stats import (
        TransferStats as TransferStats,
    )
    from kvplug.model import (
        ModelInfo as ModelInfo,
        positions_of as positions_of,
    )
    from kvplug.pipe import (
        Blocks as Blocks,
        Pipe as Pipe,
        PipeEndpoint as PipeEndpoint,
        PipeListener as PipeListener,
        Transfer as Transfer,
        Turn as Turn,
    )
    from kvplug.queue import (
        MessageQueue as MessageQueue,
        QueueEndpoint as QueueEndpoint,
        QueueHandle as QueueHandle,
        Reader as Reader,
        Wait as Wait,
    )
    from kvplug.registry import (
        PluginInfo as PluginInfo,
        Registry as Registry,
    )
    from kvplug.select import (
        Candidate as Candidate,
        Offer as Offer,
        Selection as Selection,
    )
    from kvplug.spec import (
        CommandSpec as CommandSpec,
        ConnectorSpec as ConnectorSpec,
        Kind as Kind,
        Probe as Probe,
        SinkSpec as SinkSpec,
        TransportSpec as TransportSpec,
    )
    from kvplug.streams import (
        lend_stream as lend_stream,
        take_back_stream as take_back_stream,
    )
    from kvplug.trust.addresses import (
        local_domain as local_domain,
    )
    from kvplug.trust.channel import (
        Channel as Channel,
    )
    from kvplug.trust.connection import (
        Connection as Connection,
        dial as dial,
        dial_until as dial_until,
    )
    from kvplug.trust.credentials import (
        Credentials as Credentials,
        Secret as Secret,
    )
    from kvplug.trust.identity import (
        PeerIdentity as PeerIdentity,
        this_process as this_process,
    )
    from kvplug.trust.listener import (
        Listener as Listener,
    )
