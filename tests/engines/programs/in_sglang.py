"""SGLang's server: one prompt, over the store that is named."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time


def main(model_folder: str, given: str) -> None:
    asked = json.loads(given)
    from sglang_servers import Server  # of the tests of kvplug-sglang

    extra = {"stores": asked["stores"], "options": asked["options"]}
    with Server(model_folder, asked["port"], extra) as server:
        server.wait_until_ready()
        answer = server.ask(asked["prompt"], max_tokens=asked["max_tokens"])
        if not answer.cached:
            limit = time.monotonic() + 60
            while server.metric("kvplug_transfers_total", op="put") < len(asked["prompt"]) // 16:
                if time.monotonic() > limit:
                    raise AssertionError(f"the pages were not stored:\n{server.log[-5000:]}")
                time.sleep(0.2)
    print(
        json.dumps(
            {
                "answer": list(answer.tokens),
                "found": answer.cached,
                "version": importlib.metadata.version("sglang"),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
