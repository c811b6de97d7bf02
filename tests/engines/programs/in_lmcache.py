"""LMCache's server with LMCache's own client, which stands for an engine: KV of two prompts that it makes,
over the store that is named. The answer is the checksums of what it got back."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from answering import run

CHUNK_TOKENS = 256


def answer(model_folder: str, asked: dict[str, Any]) -> tuple[list[Any], int]:
    from lmcache_programs import ask, served, status  # of the tests of kvplug-lmcache

    params = {"stores": asked["stores"], "options": asked["options"]}
    with tempfile.TemporaryDirectory() as folder, served(params, Path(folder) / "log") as ports:
        hits, checksums = ask(ports)
        limit = time.monotonic() + 30
        while status(ports)["num_pages"] < 4:  # it stores behind
            if time.monotonic() > limit:
                raise AssertionError(f"the chunks were not stored: {status(ports)}")
            time.sleep(0.1)
    found = sum(int(hit.partition("/")[0]) for hit in hits[::2])  # the first lookup of each prompt
    return sorted(set(checksums)), CHUNK_TOKENS * found


if __name__ == "__main__":
    run("lmcache", answer)
