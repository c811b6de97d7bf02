"""The connector "memory": an engine of this process loads what another one has computed. For tests.

::

    scheduler side                                worker side
    get_num_new_matched_tokens   looks into the peer's table, or at the reference that the request carries
    update_state_after_alloc     plans a load  ->   start_load_kv copies, or a later step does (async_load)
    request_finished             plans a save,
                                 keeps blocks  ->   a later step copies them and names the request as sent

An example. Nothing runs outside the engine's own calls: a load in the background waits for a later
step. Both sides and the peer engine are in one process, and the table
(:mod:`kvplug_testing.memory.entry_table`) is all that they share; whatever else one side tells the other goes
through metadata, as between processes.
"""

from __future__ import annotations

from kvplug_testing.memory.connector.scheduler import PARAMS, MemoryScheduler, OrderError
from kvplug_testing.memory.connector.worker import MemoryWorker

__all__ = ["PARAMS", "MemoryScheduler", "MemoryWorker", "OrderError"]
