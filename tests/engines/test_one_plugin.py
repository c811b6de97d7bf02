"""One store, the sample of the docs from its own wheel, under transformers, vLLM, SGLang and LMCache.

Each engine runs twice over the same database, in processes that know nothing of each other. The second run
finds what the first one kept, and answers the same. No engine finds pages of another: their keys differ.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROMPT = [1000 + 7 * at for at in range(300)]
MAX_TOKENS = 8
RUN_S = 400.0
MODELS = ("transformers", "vllm", "sglang")
"""Engines that run a model; LMCache's client makes KV itself."""
LEAST_FOUND = {"transformers": 288, "vllm": 256, "sglang": 288, "lmcache": 1024}
"""Tokens of whole pages of the prompt, and of LMCache's two prompts of two chunks."""


@attrs.frozen
class Kept:
    """What is in the database."""

    keys: frozenset[bytes]
    num_series: int
    nbytes: int

    @classmethod
    def of(cls, folder: Path) -> Kept:
        path = folder / "pages.sqlite"
        if not path.exists():
            return cls(frozenset(), 0, 0)
        with sqlite3.connect(path) as db:
            rows = db.execute("SELECT key, series, length(page) FROM pages").fetchall()
        return cls(
            frozenset(key for key, _, _ in rows),
            len({series for _, series, _ in rows}),
            sum(row[2] for row in rows),
        )


def python_of(engine: str) -> str:
    if engine == "transformers":
        return sys.executable
    return str(Path(os.environ["KVPLUG_TEST_ENGINES"]) / engine / "bin" / "python")


def run(engine: str, model: str, folder: Path) -> dict[str, Any]:
    """One run of an engine, in a process of its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    asked = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "port": port}
    asked |= {"stores": ["sqlite"], "options": {"sqlite": {"path": str(folder)}}}
    rooms = [f"plugins/kvplug-{name}/tests" for name in ("sglang", "lmcache", "redis", "vllm")]
    helpers = [str(ROOT / room) for room in (*rooms, "tests/prerequisites")]
    done = subprocess.run(
        [python_of(engine), str(HERE / "programs" / f"in_{engine}.py"), model, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(helpers), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_one_store_serves_every_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.convert import converted

    model, folder = str(converted(find_gguf())), tmp_path / "store"
    rows, answers, before = [], {}, Kept.of(folder)
    for engine in LEAST_FOUND:
        first = run(engine, model, folder)
        kept = Kept.of(folder)
        assert first["found"] == 0, f"{engine} finds pages of another engine"
        assert kept.keys > before.keys, f"{engine} keeps nothing"
        assert kept.num_series > before.num_series, f"pages of {engine} are in a series of another engine"
        second = run(engine, model, folder)
        assert second["answer"] == first["answer"], f"{engine} answers otherwise after it has loaded"
        assert second["found"] == LEAST_FOUND[engine]
        assert Kept.of(folder).keys == kept.keys, f"{engine} keeps again what is there"
        answers[engine] = first["answer"]
        pages, nbytes = len(kept.keys - before.keys), kept.nbytes - before.nbytes
        rows.append(
            f"| {engine} {first['version']} | yes | {second['found']} | {pages} | {nbytes / 1e6:.1f} |"
        )
        before = kept
    assert len({tuple(answers[engine]) for engine in MODELS}) == 1, answers
    with capsys.disabled():
        columns = "| engine | same answer | tokens found | pages | MB |"
        print("", columns, "| --- " * 5 + "|", *rows, sep="\n")
