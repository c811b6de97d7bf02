"""Time to the first token in vLLM: with kvplug, with vLLM's ExampleConnector over a disk, and recomputed.

    python benchmarks/vllm_ttft.py MODEL [--tokens 500,1500] [--rounds 9] [--markdown FILE] [--json FILE]

Four engines, each in a process of its own, one request at a time, in turns: one computes each prompt, one
finds it in vLLM's own prefix cache (the floor), and two have saved it before and load it through a connector,
with vLLM's own cache emptied. Needs the environment of docs/how-to/run-under-vllm.md, with kvplug-testing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fs import add_outputs, machine, quartiles, write

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
    began = time.perf_counter()
    answer = its.one(prompt, max_tokens=1)
    return time.perf_counter() - began, answer.num_cached


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a name or a folder")
    parser.add_argument("--tokens", default="500,1500", help="of the prompts (default 500,1500)")
    parser.add_argument("--rounds", type=int, default=9, help="default 9")
    add_outputs(parser)
    given = parser.parse_args()
    lengths = [int(each) for each in given.tokens.split(",")]
    lines = ["| prompt tokens | | loaded | TTFT, ms | of recomputing | quartiles |", "| --- " * 6 + "|"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for name, transfer in candidates(folder).items():
            running[name] = stack.enter_context(engine(given.model, transfer, **SETTINGS))
            print(f"{name}: started", file=sys.stderr)
        for length in lengths:
            taken: dict[str, list[float]] = {name: [] for name in running}
            cached = dict.fromkeys(running, 0)
            for round_ in range(given.rounds + 1):
                # a new prompt each time: the example connector never reads twice what it has just written
                chance = random.Random((length, round_).__repr__())
                prompt = [chance.randrange(1000, 40_000) for _ in range(length)]
                order = list(running)[round_ % len(running) :] + list(running)[: round_ % len(running)]
                for name in order:
                    if name != "recomputed":
                        running[name].one(prompt, max_tokens=1)
                        time.sleep(0.2)  # what is saved in the background is there
                    took, cached[name] = first_token(name, running[name], prompt)
                    if round_:
                        taken[name].append(took)
            for name, each in taken.items():
                shares = [a / b for a, b in zip(each, taken["recomputed"], strict=True)]
                low, share, high = quartiles(shares)
                lines.append(
                    f"| {length} | {name} | {cached[name]} | {statistics.median(each) * 1e3:.0f}"
                    f" | {share:.2f} | {low:.2f} to {high:.2f} |"
                )
                print(lines[-1], file=sys.stderr)
        lines += ["", f"{machine(folder, 2)}, {given.rounds} rounds."]
    write(given, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
