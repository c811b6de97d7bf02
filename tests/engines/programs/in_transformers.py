"""kvplug's own engine of transformers: one prompt, over the store that is named."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from answering import run


def answer(model_folder: str, asked: dict[str, Any]) -> tuple[list[Any], int]:
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
    return list(sequence.output), sequence.num_loaded_tokens


if __name__ == "__main__":
    run("transformers", answer)
