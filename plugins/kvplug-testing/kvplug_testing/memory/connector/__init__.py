"""The connector "memory": an engine loads KV that another engine of this process has computed. For tests.

::

    scheduler side                                worker side
    get_num_new_matched_tokens   looks into the peer's table, or at the reference that the request carries
    update_state_after_alloc     plans a load  ->   start_load_kv copies, or a later step does (async_load)
    request_finished             plans a save,
                                 keeps blocks  ->   a later step copies them and names the request as sent

It is also an example. It runs only inside the engine's calls: a background load waits for a later step. Both
sides and the peer engine are in one process, and share only the table
(:mod:`kvplug_testing.memory.connector.table`). All other data goes through metadata, as between processes.
"""

from __future__ import annotations

from kvplug_testing.memory.connector.scheduler import PARAMS, MemoryScheduler, OrderError
from kvplug_testing.memory.connector.worker import MemoryWorker

__all__ = ["PARAMS", "MemoryScheduler", "MemoryWorker", "OrderError"]
