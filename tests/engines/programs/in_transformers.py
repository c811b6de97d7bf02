"""kvplug's own engine of transformers: one prompt, over the store that is named."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from answering import run


def answer(model_folder: str, asked: dict[str, Any]) -> tuple[list[Any], int]:
    from kvplug import Config
    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.model.load import load

    config = Config.from_dict(
        {
            "role": "both",
            "host": f"unix:@one-plugin-{secrets.token_hex(8)}",
            "stores": asked["stores"],
            "options": {**asked["options"], "lookup": {"load_policy": "always"}},
        }
    )
    engine = Engine.connected(load(Path(model_folder)).model, config)
    sequence = engine.add(asked["prompt"], max_new_tokens=asked["max_tokens"])
    list(engine.run())
    engine.settle(timeout=30)
    engine.shutdown()
    return list(sequence.output), sequence.num_loaded_tokens


if __name__ == "__main__":
    run("transformers", answer)
