"""A worker's link to its parent: it receives commands, sends events, and dies with the parent."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from kvplug import KvplugError

_PR_SET_PDEATHSIG = 1


class ParentLink:
    """The worker's end: one JSON object per line, commands on stdin, events on the original stdout.

    The worker dies with its parent: on Linux the kernel kills it, even while it computes or is stopped.
    Elsewhere, and if the parent died before this was set up, the worker ends at the end of stdin. Stdout of
    libraries is redirected to stderr, so that it does not mix with the events.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="kvplug-demo-parent", daemon=True).start()

    def send(self, event: str, **facts: Any) -> None:
        """Send one event. Ends this process if the parent no longer reads."""
        try:
            with self._lock:
                self._events.write(json.dumps({"event": event, **facts}) + "\n")
        except BrokenPipeError:
            os._exit(1)

    def commands(self) -> Iterator[dict[str, Any]]:
        """Yield each command until the parent sends "stop"."""
        while (command := self._commands.get())["op"] != "stop":
            yield command

    def run(self, work: Callable[[], None]) -> int:
        """Call ``work``, and report its failure as the event "error". Returns the exit status."""
        try:
            work()
        except (KvplugError, ValueError, OSError) as e:
            self.send("error", kind=type(e).__name__, text=str(e))
        except Exception as e:
            traceback.print_exc()
            self.send("error", kind=type(e).__name__, text=f"{type(e).__name__}: {e}")
        else:
            return 0
        return 1

    def _listen(self) -> None:
        stopped = False
        for line in sys.stdin:
            command = json.loads(line)
            stopped = stopped or command["op"] == "stop"
            self._commands.put(command)
        if not stopped:
            os._exit(1)


def start_log() -> None:
    """Log at the level in ``KVPLUG_LOG``, which the command line has checked."""
    level = os.environ.get("KVPLUG_LOG", "").strip().upper()
    if level:
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
