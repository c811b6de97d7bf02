"""What all programs do: read what is asked, and print the answer as a line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any


def run(package: str, answer: Callable[[str, dict[str, Any]], tuple[list[Any], int]]) -> None:
    """``answer(model_folder, asked)`` returns the answer, and how many tokens were found in the store."""
    model_folder, asked = sys.argv[1:]
    said, found = answer(model_folder, json.loads(asked))
    version = importlib.metadata.version(package)
    print(json.dumps({"answer": said, "found": found, "version": version}))
