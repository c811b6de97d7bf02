# The public names of this package and the modules that define them. Read by type checkers and kvplug.door.

from kvplug.config.config import (
    Role as Role,
)
from kvplug.engine.connector.scheduler import (
    SchedulerConnector as SchedulerConnector,
)
from kvplug.engine.connector.values import (
    NO_BLOCK as NO_BLOCK,
    BlockIds as BlockIds,
    CacheEvent as CacheEvent,
    CacheGroup as CacheGroup,
    KVCacheConfig as KVCacheConfig,
    Parallelism as Parallelism,
    Plain as Plain,
    Request as Request,
    RequestEnd as RequestEnd,
    ScheduledRequest as ScheduledRequest,
    SchedulerOutput as SchedulerOutput,
    WorkerOutput as WorkerOutput,
)
from kvplug.engine.connector.worker import (
    WorkerConnector as WorkerConnector,
)
from kvplug.engine.context import (
    ConnectorContext as ConnectorContext,
    Engine as Engine,
    PeerLink as PeerLink,
    Peers as Peers,
)
from kvplug.engine.joined_engines import (
    JoinedEngines as JoinedEngines,
)
from kvplug.engine.layout import (
    KVLayout as KVLayout,
)
from kvplug.engine.page_cache import (
    FlatPage as FlatPage,
)
from kvplug.engine.persistent_link import (
    PersistentLink as PersistentLink,
)
from kvplug.errors import (
    EntryGoneError as EntryGoneError,
    LayoutError as LayoutError,
    StalledError as StalledError,
)
from kvplug.metrics.reasons import (
    reason_of as reason_of,
)
from kvplug.metrics.sinks import (
    Sink as Sink,
)
from kvplug.metrics.spans import (
    SpanLog as SpanLog,
)
from kvplug.metrics.stats import (
    TransferStats as TransferStats,
)
from kvplug.negotiation.checkpoint import (
    Checkpoint as Checkpoint,
)
from kvplug.negotiation.model import (
    ModelInfo as ModelInfo,
)
from kvplug.transport.block_views import (
    BlockViews as BlockViews,
)
from kvplug.transport.spec import (
    CommandSpec as CommandSpec,
    ConnectorSpec as ConnectorSpec,
    SinkSpec as SinkSpec,
)
from kvplug.transport.store.cache_blocks import (
    PageBlocks as PageBlocks,
)
from kvplug.transport.store.keys import (
    ChainMemo as ChainMemo,
)
