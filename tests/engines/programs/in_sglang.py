"""SGLang's server: one prompt, over the store that is named."""

from __future__ import annotations

import time
from typing import Any

from answering import run


def answer(model_folder: str, asked: dict[str, Any]) -> tuple[list[Any], int]:
    from sglang_servers import Server  # of the tests of kvplug-sglang

    extra = {"stores": asked["stores"], "options": asked["options"]}
    with Server(model_folder, asked["port"], extra) as server:
        server.wait_until_ready()
        result = server.ask(asked["prompt"], max_tokens=asked["max_tokens"])
        if not result.cached:
            limit = time.monotonic() + 60
            while server.metric("kvplug_operations_total", op="put") < len(asked["prompt"]) // 16:
                if time.monotonic() > limit:
                    raise AssertionError(f"the pages were not stored:\n{server.log[-5000:]}")
                time.sleep(0.2)
    return list(result.tokens), result.cached


if __name__ == "__main__":
    run("sglang", answer)
