"""On which CPUs kvplug's threads run in each process of vLLM's: a plugin that vLLM loads there.

Tests install this file as the module ``kvplug_thread_reporter``. Each process answers a file ``ask`` in its
folder by a file of its own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def register() -> None:
    """In vLLM's group of entry points."""
    threading.Thread(target=_answer_all, daemon=True).start()


def _answer_all() -> None:
    while True:
        if (FOLDER / "ask").exists():
            part = FOLDER / f"{os.getpid()}.part"
            cpus = {
                thread.name: sorted(os.sched_getaffinity(thread.native_id))
                for thread in threading.enumerate()
                if thread.native_id is not None and (thread.name == "MainThread" or "kvplug" in thread.name)
            }
            part.write_text(json.dumps(cpus))
            part.rename(FOLDER / f"{os.getpid()}.json")
        time.sleep(0.05)
