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
MAIN = "MainThread"


def register() -> None:
    """In vLLM's group of entry points."""
    threading.Thread(target=_answer_all, daemon=True).start()


def _answer_all() -> None:
    while True:
        if (FOLDER / "ask").exists():
            part = FOLDER / f"{os.getpid()}.part"
            part.write_text(json.dumps(_threads()))
            part.rename(FOLDER / f"{os.getpid()}.json")
        time.sleep(0.05)


def _threads() -> dict[str, list[int]]:
    return {
        thread.name: sorted(os.sched_getaffinity(thread.native_id))
        for thread in threading.enumerate()
        if thread.native_id is not None and (thread.name == MAIN or "kvplug" in thread.name)
    }
