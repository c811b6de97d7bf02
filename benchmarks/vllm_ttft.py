"""Time to the first token in vLLM: with kvplug, with vLLM's ExampleConnector over a disk, and recomputed.

    python benchmarks/vllm_ttft.py MODEL [--tokens 500,1500] [--rounds 9] [--markdown FILE] [--json FILE]

Four engines, each in a process of its own, one request at a time, in turns: one computes each prompt, one
finds it in vLLM's own prefix cache (the floor), and two have saved it before and load it through a connector,
with vLLM's own cache emptied. Needs the environment of docs/how-to/run-under-vllm.md, with kvplug-testing.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "plugins/kvplug-vllm/tests"))

from vllm_engines import Engine, engine, transfer_config  # noqa: E402

PORT = 29655
SETTINGS = {"max_model_len": 2048}


def candidates(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Their kv-transfer-configs."""
    options = {"host": {"size": 1 << 30}}
    return {
        "recomputed": None,
        "in vLLM's cache": None,
        "kvplug": transfer_config("kv_both", PORT, options=options),
        "ExampleConnector": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


def first_token(name: str, its: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and how many of the tokens were not computed."""
    if name != "in vLLM's cache":
        assert its.ask("reset_prefix_cache"), f"{name} does not forget vLLM's own cache"
    took, answer = harness.seconds(lambda: its.one(prompt, max_tokens=1))
    return took, answer.num_cached


def main() -> None:
    parser = harness.parser(__doc__, 9)
    parser.add_argument("model", help="a name or a folder")
    parser.add_argument("--tokens", default="500,1500", help="of the prompts (default 500,1500)")
    given = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for name, transfer in candidates(folder).items():
            running[name] = stack.enter_context(engine(given.model, transfer, **SETTINGS))
            print(f"{name}: started", file=sys.stderr)
        for length in map(int, given.tokens.split(",")):
            taken: dict[str, list[float]] = {name: [] for name in running}
            cached = dict.fromkeys(running, 0)
            for round_ in range(given.rounds + 1):
                # a new prompt each time: the example connector never reads twice what it has just written
                chance = random.Random((length, round_).__repr__())
                prompt = [chance.randrange(1000, 40_000) for _ in range(length)]
                for name in harness.in_order(running, round_):
                    if name != "recomputed":
                        running[name].one(prompt, max_tokens=1)
                        time.sleep(0.2)  # what is saved in the background is there
                    took, cached[name] = first_token(name, running[name], prompt)
                    if round_:
                        taken[name].append(took)
            for name, each in taken.items():
                spread = harness.spread(each, taken["recomputed"])
                rows.append([length, name, cached[name], f"{statistics.median(each) * 1e3:.0f}", *spread])
        about = f"{harness.machine(folder)}, {given.rounds} rounds."
    head = ["prompt tokens", "", "loaded", "TTFT, ms", "of recomputing", "quartiles"]
    harness.write(given, harness.table(head, rows), about)


if __name__ == "__main__":
    main()
