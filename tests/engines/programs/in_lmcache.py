"""LMCache's server with LMCache's own client, which stands for an engine: KV of two prompts that it makes,
over the store that is named. The answer is the checksums of what it got back."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path

CHUNK_TOKENS = 256


def main(model_folder: str, given: str) -> None:
    asked = json.loads(given)
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
    print(
        json.dumps(
            {
                "answer": sorted(set(checksums)),
                "found": CHUNK_TOKENS * found,
                "version": importlib.metadata.version("lmcache"),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
