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
    "kvplug.net.deadline": (
        "DEFAULT_TIMEOUT",
        "Deadline",
        "Timeout",
    ),
    "kvplug.net.fate": ("Fate",),
    "kvplug.net.turn": ("Turn",),
    "kvplug.net.fork": ("close_after_fork",),
    "kvplug.transport.capabilities": (
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
    "kvplug.negotiation.model": (
        "ModelInfo",
        "positions_of",
    ),
    "kvplug.engine.layout": (
        "KVLayout",
        "blocks_of",
        "gather",
        "permute",
        "scatter",
        "slots",
        "spans",
        "views",
    ),
    "kvplug.net.checksum": (
        "digest",
        "verify",
    ),
    "kvplug.transport.pipe": (
        "Blocks",
        "Pipe",
        "PipeEndpoint",
        "PipeListener",
        "Transfer",
    ),
    "kvplug.transport.acceptor": (
        "Acceptor",
        "PipeAcceptor",
    ),
    "kvplug.transport.queue": (
        "MessageQueue",
        "QueueEndpoint",
        "QueueHandle",
        "Reader",
        "Wait",
    ),
    "kvplug.transport.communicator": (
        "All2AllManager",
        "DeviceCommunicator",
        "RecvOp",
        "SendOp",
        "TokenSplit",
    ),
    "kvplug.transport.lookup": (
        "Entry",
        "EntryHeader",
        "EntrySink",
        "LookupBuffer",
        "LookupEndpoint",
        "LookupStore",
    ),
    "kvplug.transport.spec": (
        "CommandSpec",
        "ConnectorSpec",
        "Kind",
        "Probe",
        "SinkSpec",
        "TransportSpec",
    ),
    "kvplug.negotiation.select": (
        "Candidate",
        "Offer",
        "Selection",
    ),
    "kvplug.transport.lease": (
        "Lease",
        "Leases",
    ),
    "kvplug.transport.events": (
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
    "kvplug.net.liveness": (
        "Heartbeat",
        "Watch",
        "watch",
    ),
    "kvplug.net.streams": (
        "lend_stream",
        "take_back_stream",
    ),
    "kvplug.net.trust.addresses": ("local_domain",),
    "kvplug.net.trust.channel": ("Channel",),
    "kvplug.net.trust.connection": (
        "Connection",
        "dial",
        "dial_until",
    ),
    "kvplug.net.trust.credentials": (
        "Credentials",
        "Secret",
    ),
    "kvplug.net.trust.identity": (
        "PeerIdentity",
        "this_process",
    ),
    "kvplug.net.trust.listener": ("Listener",),
    "kvplug.negotiation.handshake.agreement": (
        "Agreement",
        "agree",
    ),
    "kvplug.negotiation.handshake.hello": ("Hello",),
    "kvplug.transport.group.group": ("StatelessGroup",),
    "kvplug.transport.group.over": ("group_from_process_group",),
    "kvplug.transport.group.mesh": ("Mesh",),
    "kvplug.transport.group.pipes": ("connect_ranks",),
    "kvplug.metrics.reasons": ("reason_of",),
    "kvplug.metrics.stats": ("TransferStats",),
    "kvplug.metrics.sinks": (
        "HookSink",
        "LogSink",
        "Sink",
    ),
    "kvplug.metrics.prometheus": ("prometheus_sinks",),
    "kvplug.engine.connector.scheduler": ("SchedulerConnector",),
    "kvplug.engine.connector.worker": ("WorkerConnector",),
    "kvplug.engine.connector.values": (
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
    "kvplug.transport.context": (
        "CommunicatorContext",
        "LookupContext",
        "PipeContext",
        "QueueContext",
    ),
    "kvplug.engine.context": (
        "ConnectorContext",
        "PeerLink",
        "PeerListener",
        "Peers",
    ),
    "kvplug.transport.hookspecs": (
        "PLUGIN_API",
        "hookimpl",
    ),
    "kvplug.assembly.registry": (
        "PluginInfo",
        "Registry",
    ),
    "kvplug.assembly": (
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
    from kvplug.assembly import (
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
    from kvplug.assembly.registry import (
        PluginInfo as PluginInfo,
        Registry as Registry,
    )
    from kvplug.config import (
        Config as Config,
        OptionRow as OptionRow,
        Role as Role,
        check_options as check_options,
        describe_options as describe_options,
        option as option,
    )
    from kvplug.engine.connector.scheduler import (
        SchedulerConnector as SchedulerConnector,
    )
    from kvplug.engine.connector.values import (
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
    from kvplug.engine.connector.worker import (
        WorkerConnector as WorkerConnector,
    )
    from kvplug.engine.context import (
        ConnectorContext as ConnectorContext,
        PeerLink as PeerLink,
        PeerListener as PeerListener,
        Peers as Peers,
    )
    from kvplug.engine.layout import (
        KVLayout as KVLayout,
        blocks_of as blocks_of,
        gather as gather,
        permute as permute,
        scatter as scatter,
        slots as slots,
        spans as spans,
        views as views,
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
    from kvplug.negotiation.handshake.agreement import (
        Agreement as Agreement,
        agree as agree,
    )
    from kvplug.negotiation.handshake.hello import (
        Hello as Hello,
    )
    from kvplug.negotiation.model import (
        ModelInfo as ModelInfo,
        positions_of as positions_of,
    )
    from kvplug.negotiation.select import (
        Candidate as Candidate,
        Offer as Offer,
        Selection as Selection,
    )
    from kvplug.net.checksum import (
        digest as digest,
        verify as verify,
    )
    from kvplug.net.deadline import (
        DEFAULT_TIMEOUT as DEFAULT_TIMEOUT,
        Deadline as Deadline,
        Timeout as Timeout,
    )
    from kvplug.net.fate import (
        Fate as Fate,
    )
    from kvplug.net.fork import (
        close_after_fork as close_after_fork,
    )
    from kvplug.net.liveness import (
        Heartbeat as Heartbeat,
        Watch as Watch,
        watch as watch,
    )
    from kvplug.net.streams import (
        lend_stream as lend_stream,
        take_back_stream as take_back_stream,
    )
    from kvplug.net.trust.addresses import (
        local_domain as local_domain,
    )
    from kvplug.net.trust.channel import (
        Channel as Channel,
    )
    from kvplug.net.trust.connection import (
        Connection as Connection,
        dial as dial,
        dial_until as dial_until,
    )
    from kvplug.net.trust.credentials import (
        Credentials as Credentials,
        Secret as Secret,
    )
    from kvplug.net.trust.identity import (
        PeerIdentity as PeerIdentity,
        this_process as this_process,
    )
    from kvplug.net.trust.listener import (
        Listener as Listener,
    )
    from kvplug.net.turn import Turn as Turn
    from kvplug.transport.acceptor import (
        Acceptor as Acceptor,
        PipeAcceptor as PipeAcceptor,
    )
    from kvplug.transport.capabilities import (
        Capabilities as Capabilities,
        Cost as Cost,
        Requirements as Requirements,
    )
    from kvplug.transport.communicator import (
        All2AllManager as All2AllManager,
        DeviceCommunicator as DeviceCommunicator,
        RecvOp as RecvOp,
        SendOp as SendOp,
        TokenSplit as TokenSplit,
    )
    from kvplug.transport.context import (
        CommunicatorContext as CommunicatorContext,
        LookupContext as LookupContext,
        PipeContext as PipeContext,
        QueueContext as QueueContext,
    )
    from kvplug.transport.events import (
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
    from kvplug.transport.group.group import (
        StatelessGroup as StatelessGroup,
    )
    from kvplug.transport.group.mesh import (
        Mesh as Mesh,
    )
    from kvplug.transport.group.over import (
        group_from_process_group as group_from_process_group,
    )
    from kvplug.transport.group.pipes import (
        connect_ranks as connect_ranks,
    )
    from kvplug.transport.hookspecs import (
        PLUGIN_API as PLUGIN_API,
        hookimpl as hookimpl,
    )
    from kvplug.transport.lease import (
        Lease as Lease,
        Leases as Leases,
    )
    from kvplug.transport.lookup import (
        Entry as Entry,
        EntryHeader as EntryHeader,
        EntrySink as EntrySink,
        LookupBuffer as LookupBuffer,
        LookupEndpoint as LookupEndpoint,
        LookupStore as LookupStore,
    )
    from kvplug.transport.pipe import (
        Blocks as Blocks,
        Pipe as Pipe,
        PipeEndpoint as PipeEndpoint,
        PipeListener as PipeListener,
        Transfer as Transfer,
    )
    from kvplug.transport.queue import (
        MessageQueue as MessageQueue,
        QueueEndpoint as QueueEndpoint,
        QueueHandle as QueueHandle,
        Reader as Reader,
        Wait as Wait,
    )
    from kvplug.transport.spec import (
        CommandSpec as CommandSpec,
        ConnectorSpec as ConnectorSpec,
        Kind as Kind,
        Probe as Probe,
        SinkSpec as SinkSpec,
        TransportSpec as TransportSpec,
    )
