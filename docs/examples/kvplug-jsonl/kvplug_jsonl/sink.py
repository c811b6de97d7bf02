"""The sink "jsonl": a line of JSON for each snapshot, appended to a file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from kvplug import ConfigError
from kvplug.engine import Sink
from kvplug_jsonl.options import JsonlOptions


class JsonlSink(Sink):
    """The factory of the spec: kvplug calls it with the options, and calls ``emit`` from one thread."""

    def __init__(self, options: JsonlOptions) -> None:
        try:
            self._file = open(options.path, "ab", buffering=0)  # noqa: SIM115 - until close()
        except OSError as e:
            raise ConfigError(f"options.jsonl.path: {options.path!r}: {e.strerror}") from e

    def emit(self, snapshot: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Append the counts since the last call. A reader of the file adds them up."""
        line = json.dumps({"time": time.time(), "labels": dict(labels), **snapshot})
        data = f"{line}\n".encode()
        if self._file.write(data) != len(data):  # one write, so that lines of several processes do not mix
            raise OSError(f"the disk of {self._file.name} is full")

    def close(self) -> None:
        self._file.close()
