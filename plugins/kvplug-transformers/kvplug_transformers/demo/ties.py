"""How a worker hangs together with its parent: commands in, events out, and never outliving it."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1


class Parent:
    """The worker's end: one JSON object a line, commands on stdin, events on what was stdout.

    The worker is gone when its parent is: on Linux the kernel kills it (also while it computes, or is
    stopped); elsewhere, and should the parent have died before that was set up, the end of stdin does it.
    Whatever a library prints goes to stderr, and not between the events.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="kvplug-demo-parent", daemon=True).start()

    def tell(self, event: str, **facts: Any) -> None:
        """Send one event. A parent that no longer listens ends this process."""
        try:
            with self._lock:
                self._events.write(json.dumps({"event": event, **facts}) + "\n")
        except BrokenPipeError:
            os._exit(1)

    def commands(self) -> Iterator[dict[str, Any]]:
        """Each command as it comes, until the parent says stop."""
        while (command := self._commands.get())["op"] != "stop":
            yield command

    def _listen(self) -> None:
        stopped = False
        for line in sys.stdin:
            command = json.loads(line)
            stopped = stopped or command["op"] == "stop"
            self._commands.put(command)
        if not stopped:
            os._exit(1)
