# The public names of this package and the modules that define them. Read by type checkers and kvplug.door.
# Grouped by what an author writes.
# ruff: noqa: I001

# Offer anything: the hook, specs, options, capabilities, and the errors and timeouts that all kinds share.
from kvplug.config.options import (
    option as option,
)
from kvplug.errors import (
    BusyError as BusyError,
    WireError as WireError,
)
from kvplug.net.deadline import (
    DEFAULT_TIMEOUT as DEFAULT_TIMEOUT,
    Deadline as Deadline,
    Timeout as Timeout,
)
from kvplug.transport.capabilities import (
    Capabilities as Capabilities,
)
from kvplug.transport.hookspecs import (
    hookimpl as hookimpl,
)
from kvplug.transport.spec import (
    DirectorySpec as DirectorySpec,
    Probe as Probe,
    StoreSpec as StoreSpec,
    TransportSpec as TransportSpec,
)

# Write a store of blocking calls.
from kvplug.transport.store.blocking import (
    BlockingStore as BlockingStore,
)
from kvplug.transport.store.header import (
    PageSeal as PageSeal,
)
from kvplug.transport.store.folder.store import (
    FolderStore as FolderStore,
)
from kvplug.transport.store.results import (
    MissReason as MissReason,
    Usage as Usage,
)

# Write a store that runs its jobs itself.
from kvplug.transport.store.copy import (
    PageCopy as PageCopy,
)
from kvplug.transport.store.engine import (
    JobEngine as JobEngine,
    JobTask as JobTask,
)
from kvplug.transport.store.events import (
    PageEvent as PageEvent,
)
from kvplug.transport.store.format import (
    PageFormat as PageFormat,
)
from kvplug.transport.store.job import (
    GetJob as GetJob,
    Job as Job,
)
from kvplug.transport.store.keys import (
    Series as Series,
)
from kvplug.transport.store.memory import (
    PageBuffers as PageBuffers,
    PageMemory as PageMemory,
    PageRows as PageRows,
    ReservedPages as ReservedPages,
)
from kvplug.transport.store.results import (
    Presence as Presence,
    PutReason as PutReason,
)
from kvplug.transport.store.store import (
    PageRequest as PageRequest,
    Store as Store,
)

# Write a pipe.
from kvplug.errors import (
    TensorMismatchError as TensorMismatchError,
)
from kvplug.net.memory.room import (
    MessageLimit as MessageLimit,
)
from kvplug.transport.pipe.blocks import (
    Blocks as Blocks,
)
from kvplug.transport.pipe.endpoint import (
    DuplexEndpoint as DuplexEndpoint,
    PipeEndpoint as PipeEndpoint,
    PipeListener as PipeListener,
)
from kvplug.transport.pipe.partial import (
    PartialMessage as PartialMessage,
)
from kvplug.transport.pipe.pipe import (
    DuplexPipe as DuplexPipe,
    Pipe as Pipe,
)
from kvplug.transport.pipe.offers import (
    OfferPipe as OfferPipe,
)
from kvplug.transport.pipe.transfer import (
    SendWindow as SendWindow,
    Transfer as Transfer,
)

# Write a queue.
from kvplug.transport.queue import (
    MessageQueue as MessageQueue,
    QueueEndpoint as QueueEndpoint,
)

# Write a communicator.
from kvplug.transport.communicator import (
    DeviceCommunicator as DeviceCommunicator,
)
from kvplug.transport.group.mesh import (
    Mesh as Mesh,
)

# Write a lookup buffer.
from kvplug.transport.lookup import (
    Entry as Entry,
    LookupBuffer as LookupBuffer,
    LookupEndpoint as LookupEndpoint,
)

# Write a directory.
from kvplug.transport.directory import (
    Directory as Directory,
)

# Connect to other processes: addresses, authenticated connections, and whether a peer is alive.
from kvplug.config.addresses import (
    Address as Address,
)
from kvplug.net.liveness import (
    Watch as Watch,
)
from kvplug.net.peer_text import (
    peer_text as peer_text,
)
from kvplug.net.trust.channel import (
    Channel as Channel,
)
from kvplug.net.trust.connection import (
    Connection as Connection,
)
from kvplug.net.trust.credentials import (
    Credentials as Credentials,
)
from kvplug.net.trust.identity import (
    PeerIdentity as PeerIdentity,
)
from kvplug.net.trust.listener import (
    Listener as Listener,
)
from kvplug.net.trust.outbox import (
    Outbox as Outbox,
)
from kvplug.transport.acceptor import (
    Acceptor as Acceptor,
)

# Run: threads, forks, descriptors, memory, streams, and exhausted resources.
from kvplug.net.exhaustion import (
    NamedExhaustion as NamedExhaustion,
)
from kvplug.net.fork import (
    close_after_fork as close_after_fork,
)
from kvplug.net.memory.memfd import (
    Memfd as Memfd,
)
from kvplug.net.memory.segment import (
    Segment as Segment,
)
from kvplug.net.streams import (
    DeviceMark as DeviceMark,
    pin_memory as pin_memory,
)
from kvplug.net.threads import (
    BackgroundThread as BackgroundThread,
    ExitGuard as ExitGuard,
)
from kvplug.transport.pipe.pipe import (
    DescriptorGuard as DescriptorGuard,
)
