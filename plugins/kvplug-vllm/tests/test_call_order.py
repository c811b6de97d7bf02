"""The order in which vLLM calls a connector is the recorded one, which lies next to this file.

Where vLLM has changed it, record it again, read the difference, and see what it means for connectors:

    tox run -e vllm -- plugins/kvplug-vllm/tests/test_call_order.py --record-order
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm

from vllm_engines import transfer_config

NAME = "vllm-0.32"
RECORD = Path(__file__).with_name(f"call_order_{NAME}.json")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        f"vllm-{vllm.__version__.rpartition('.')[0]}" != NAME,
        reason=f"the order is recorded of {NAME}, and this is {vllm.__version__}",
    ),
]
BLOCK_SIZE, NUM_LAYERS = 32, 2
SIZE = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 12,  # one of them vLLM's own
    "max_model_len": 320,
    "max_num_batched_tokens": 144,
    "hf_overrides": {"num_hidden_layers": NUM_LAYERS},
    "load_format": "dummy",  # what the tokens are does not matter here
}
LENGTHS = {"two": 80, "half": 160, "five": 160, "five more": 160, "short": 40, "long": 170, "longer": 300}
"""Tokens in a prompt. Of "half" only half is stored, and nothing of the last three."""
STEPS_TO_LOAD = 2
"""The recorder's pace."""
FEW = {"max_tokens": 3, "ignore_eos": True}


class Recording:
    """One engine after the other, and what it was asked, written down."""

    def __init__(self, start: Callable[..., Any], port: int) -> None:
        self._start = start
        self._port = port
        self.runs: dict[str, dict[str, Any]] = {}

    @contextmanager
    def engine(
        self, role: str, *, is_async: bool = False, policy: str = "recompute", setup: Any = (), **more: Any
    ) -> Iterator[Runs]:
        config = transfer_config(
            f"kv_{role}",
            self._port,
            kv_load_failure_policy=policy,
            weights="dummy",
            options={"lookup": {"async_load": is_async}},
        )
        setups = [*([setup] if isinstance(setup, str) else setup), "recorder:record"]
        with self._start(config, setup=setups, **(SIZE | more)) as engine:
            runs = Runs(engine, {"role": role, "is_async": is_async})
            yield runs
            at_end = engine.ask("recorder:end_engine")
        for facts in runs.found:
            last = facts["calls"][-1][0]
            facts["calls"] += [[last, *rest] for _, *rest in at_end]
            self.runs[facts["name"]] = facts


class Runs:
    """What one engine was asked."""

    def __init__(self, engine: Any, facts: dict[str, Any]) -> None:
        self.engine = engine
        self._facts = {**facts, "block_size": BLOCK_SIZE, "num_layers": NUM_LAYERS}
        self.found: list[dict[str, Any]] = []

    @contextmanager
    def run(self, name: str, about: str, *prompts: dict[str, Any]) -> Iterator[Any]:
        named = {f"r{at}": each for at, each in enumerate(prompts)}
        self.engine.ask("step", times=2)  # what came before is over
        self.engine.ask("recorder:begin")
        yield self.engine
        self.engine.ask("step")  # the worker side is told who has ended
        calls = self.engine.ask("recorder:end")
        self.found.append({"name": name, "about": about, **self._facts, "prompts": named, "calls": calls})


@pytest.fixture(scope="module")
def asked(prompts) -> dict[str, list[int]]:
    """Prompts that differ from the first token on."""
    text, found, at = prompts[1500], {}, 0
    for name, length in LENGTHS.items():
        found[name] = text[at : at + length]
        at += length
    return found


def prompt(num_tokens: int, num_stored: int = 0, spoilt: bool = False) -> dict[str, Any]:
    """A prompt, of which so many leading tokens are stored; ``spoilt``: loading them fails."""
    return {"num_tokens": num_tokens, "num_stored": num_stored, "spoilt": spoilt}


@pytest.fixture(scope="module")
def recorded(start, free_port, asked) -> list[dict[str, Any]]:
    recording = Recording(start, free_port())
    with recording.engine("producer", setup="faults:switchable", num_gpu_blocks_override=64) as prefill:
        stored = [asked["two"], asked["half"][:96], asked["five"], asked["five more"]]
        prefill.engine.generate(stored, max_tokens=1)
        with prefill.run(
            "save in chunks",
            "Three prompts of an engine that prefills, one shorter than two blocks, in chunks that are no"
            " whole blocks; it generates another token after each.",
            *(prompt(LENGTHS[name]) for name in ("short", "long", "longer")),
        ) as engine:
            engine.generate([asked["short"], asked["long"], asked["longer"]], max_tokens=2, ignore_eos=True)
        record_loads(recording, prefill.engine, asked)
    first = "save in chunks"  # of the engine that ended last
    return list({first: recording.runs[first], **recording.runs}.values())


def record_loads(recording: Recording, prefill: Any, asked: Any) -> None:
    two = prompt(80, num_stored=64)
    half = prompt(160, num_stored=96)
    five = prompt(160, num_stored=160)
    spoilt = prompt(160, num_stored=160, spoilt=True)

    def spoil(is_on: bool) -> None:
        prefill.ask("faults:switch", corrupt=is_on)

    def record_failure(decode: Runs, name: str, about: str) -> None:
        # Pages that were wrong once are gone, so each failure has its own.
        prefill.one(asked["five"], max_tokens=1, salt=name)
        spoil(True)
        with decode.run(name, about, spoilt) as engine:
            engine.generate([asked["five"]], salt=name, **FEW)
        spoil(False)

    with recording.engine("consumer", enable_prefix_caching=False) as decode:
        with decode.run(
            "load layer by layer",
            "Two prompts, one of them stored in part, are loaded in front of their forward pass.",
            two,
            half,
        ) as engine:
            engine.generate([asked["two"], asked["half"]], **FEW)
        record_failure(
            decode, "failed load", "The load fails, its blocks are reported, and the prompt is computed."
        )
        with decode.run(
            "preemption",
            "There are blocks for one of two requests that grow: the other is preempted, and loads again into"
            " other blocks when there are some.",
            five,
            five,
        ) as engine:
            engine.generate([asked["five"], asked["five more"]], **FEW)
    with recording.engine("consumer", is_async=True, enable_prefix_caching=False) as decode:
        with decode.run(
            "load in the background",
            "Two prompts, one of them stored in part, are loaded while the engine goes on stepping.",
            two,
            half,
        ) as engine:
            engine.generate([asked["two"], asked["half"]], **FEW)
        record_failure(
            decode,
            "failed load in the background",
            "The load fails, its blocks are reported as its request is, and the prompt is computed.",
        )
        with decode.run(
            "abort while loading",
            "A request is aborted while it loads in the background; its blocks are kept until it is named.",
            five,
        ) as engine:
            request_id = engine.ask("begin", prompt=asked["five"], max_tokens=3)
            engine.ask("step", times=2)
            engine.ask("recorder:wait_for_loads")
            engine.ask("abort", request_id=request_id)
            engine.ask("step", times=STEPS_TO_LOAD)
        assert engine.state()["requests"] == []
    with recording.engine(
        "consumer",
        policy="fail",
        setup=["faults:schedule_ahead", "faults:load_in_steps"],
        async_scheduling=True,
        enable_prefix_caching=False,
    ) as decode:
        with decode.run(
            "load with steps in flight",
            "A step is planned before the one before it has been reported.",
            two,
            half,
        ) as engine:
            engine.generate([asked["two"], asked["half"]], **FEW)
        record_failure(
            decode,
            "failed load with steps in flight",
            "The load fails while the next step, which builds on it, is planned already; the request fails.",
        )
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with recording.engine("consumer", speculative_config=drafting, enable_prefix_caching=False) as decode:
        record_failure(
            decode,
            "failed load under drafting",
            "An engine with speculative decoding ends a step after its reports. The load fails, and the"
            " prompt is computed.",
        )


def test_the_recorded_order_is_that_of_vllm(recorded, pytestconfig):
    runs = json.loads(json.dumps(recorded))
    if pytestconfig.getoption("--record-order"):
        RECORD.write_text(to_text(runs), encoding="utf-8")
        return
    expected = json.loads(RECORD.read_text(encoding="utf-8"))["runs"]
    assert [run["name"] for run in runs] == [run["name"] for run in expected]
    for run, before in zip(runs, expected, strict=True):
        assert timeless(run) == timeless(before), f"vLLM calls in another order: {run['name']}"
        assert run | {"calls": []} == before | {"calls": []}


def to_text(runs: list[dict[str, Any]]) -> str:
    """JSON with one call a line, so that a diff is readable."""
    texts = []
    for run in runs:
        calls = ",\n".join(map(json.dumps, run["calls"]))
        facts = json.dumps({key: value for key, value in run.items() if key != "calls"})
        texts.append(f'{facts[:-1]}, "calls": [\n{calls}\n]}}')
    together = ",\n".join(texts)
    return f'{{"engine": "vllm {vllm.__version__}", "runs": [\n{together}\n]}}\n'


def timeless(run: dict[str, Any]) -> list[Any]:
    """The calls, but for reports with nothing but the connector's own metadata: "lookup" has some whenever
    its peers' news come.
    """
    return [call for call in run["calls"] if call[2] != "update_connector_output" or any(call[4].values())]
