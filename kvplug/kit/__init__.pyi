# The public names of this package and the modules that define them. Read by type checkers and kvplug.door.

from kvplug.assembly.links import (
    LinkSettings as LinkSettings,
)
from kvplug.assembly.peers import (
    ControlPeers as ControlPeers,
)
from kvplug.assembly.registry import (
    PluginStatus as PluginStatus,
)
from kvplug.assembly.registry.discovery import (
    discover as discover,
)
from kvplug.assembly.resolve import (
    ResolvedConfig as ResolvedConfig,
)
from kvplug.assembly.stores import (
    PURPOSE as PURPOSE,
    StoreServer as StoreServer,
)
from kvplug.cli.completion import (
    plugins as plugins,
)
from kvplug.config.messages import (
    did_you_mean as did_you_mean,
)
from kvplug.config.options import (
    check_options as check_options,
    describe_options as describe_options,
    option_fields as option_fields,
)
from kvplug.door import (
    Door as Door,
)
from kvplug.errors import (
    CancelledError as CancelledError,
    UnknownTransportError as UnknownTransportError,
)
from kvplug.metrics.rate import (
    host_load as host_load,
)
from kvplug.metrics.reasons import (
    Op as Op,
    Reason as Reason,
)
from kvplug.metrics.stats import (
    StatsSnapshot as StatsSnapshot,
)
from kvplug.net.trust.challenge import (
    OPENING_SIZE as OPENING_SIZE,
    PROOF_SIZE as PROOF_SIZE,
    REPLY_SIZE as REPLY_SIZE,
)
from kvplug.net.trust.credentials import (
    Secret as Secret,
)
from kvplug.net.trust.identity import (
    IDENTITY_SIZE as IDENTITY_SIZE,
)
from kvplug.net.wire.frames import (
    MAGIC as MAGIC,
)
from kvplug.net.wire.messages import (
    prefix_size as prefix_size,
)
from kvplug.net.wire.tensors import (
    DTYPES as DTYPES,
    MAX_DIMS as MAX_DIMS,
)
from kvplug.transport.capabilities import (
    UNSTATED as UNSTATED,
)
from kvplug.transport.communicator.communicator import (
    MOVED as MOVED,
    SUMMED as SUMMED,
)
from kvplug.transport.spec import (
    TRANSPORTS as TRANSPORTS,
    Kind as Kind,
    load_target as load_target,
)
from kvplug.transport.store.events import (
    SERIES_BYTES as SERIES_BYTES,
)
from kvplug.transport.store.executor import (
    ExecutedStore as ExecutedStore,
)
from kvplug.transport.store.format import (
    Part as Part,
    opaque_format as opaque_format,
)
from kvplug.transport.store.keys import (
    foreign_key as foreign_key,
    token_identities as token_identities,
)
from kvplug.transport.store.staging.memory import (
    PinnedMemory as PinnedMemory,
    StagedPages as StagedPages,
)
from kvplug.transport.store.staging.staging import (
    Staging as Staging,
)
