# The public names of this package and the modules that define them. Read by type checkers and kvplug.door.

from kvplug_testing.checks import (
    check_communicator as check_communicator,
    check_connector as check_connector,
    check_directory as check_directory,
    check_lookup_buffer as check_lookup_buffer,
    check_pipe as check_pipe,
    check_queue as check_queue,
    check_sink as check_sink,
    check_store as check_store,
)
from kvplug_testing.contract.base import (
    law as law,
)
from kvplug_testing.contract.communicator import (
    DeviceCommunicatorContract as DeviceCommunicatorContract,
)
from kvplug_testing.contract.connector import (
    ConnectorContract as ConnectorContract,
)
from kvplug_testing.contract.directory import (
    DirectoryContract as DirectoryContract,
)
from kvplug_testing.contract.lookup import (
    LookupBufferContract as LookupBufferContract,
)
from kvplug_testing.contract.pipe import (
    PipeContract as PipeContract,
)
from kvplug_testing.contract.plugin import (
    check_plugin as check_plugin,
)
from kvplug_testing.contract.queue import (
    MessageQueueContract as MessageQueueContract,
)
from kvplug_testing.contract.sink import (
    SinkContract as SinkContract,
)
from kvplug_testing.contract.store import (
    StoreContract as StoreContract,
)
from kvplug_testing.contract.store.blocking import (
    BlockingStoreContract as BlockingStoreContract,
)
