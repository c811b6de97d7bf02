"""kvplug's own engine of transformers: one prompt, over the store that is named."""

from __future__ import annotations

import importlib.metadata
import json
import secrets
import sys
from pathlib import Path


def main(model_folder: str, given: str) -> None:
    asked = json.loads(given)
    from kvplug import Config, build_connector
    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.engine.options import EngineOptions, cache_config
    from kvplug_transformers.model.facts import describe
    from kvplug_transformers.model.load import load

    model = load(Path(model_folder)).model
    facts, options = describe(model), EngineOptions()
    config = Config.from_dict(
        {
            "role": "both",
            "host": f"unix:@one-plugin-{secrets.token_hex(8)}",
            "stores": asked["stores"],
            "options": {**asked["options"], "lookup": {"load_policy": "always"}},
        }
    )
    sides = [
        build_connector(config, side, model=facts.info, cache=cache_config(facts, options))
        for side in ("scheduler", "worker")
    ]
    engine = Engine(model, options, facts=facts, scheduler_connector=sides[0], worker_connector=sides[1])
    sequence = engine.add(asked["prompt"], max_new_tokens=asked["max_tokens"])
    list(engine.run())
    engine.settle(timeout=30)
    for side in sides:
        side.shutdown()
    print(
        json.dumps(
            {
                "answer": list(sequence.output),
                "found": sequence.num_loaded_tokens,
                "version": importlib.metadata.version("transformers"),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
