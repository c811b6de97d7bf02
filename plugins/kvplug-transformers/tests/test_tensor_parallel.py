"""An engine whose model is shared by several processes: what it computes, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplug import (
    ClosedError,
    Config,
    PeerGoneError,
    TimeoutError,
    UnsupportedError,
    worker_transports,
)
from kvplug.engine import WorkerOutput
from kvplug.net.wire import decode, encode
from kvplug_testing.peers import nothing_left

# -- parts of a model ------------------------------------------------------------------------------


class Sum:
    """An all_reduce of threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._parts: dict[int, Any] = {}

    def of(self, rank: int) -> Callable[[Any], Any]:
        def all_reduce(partial: Any) -> Any:
            self._parts[rank] = partial.clone()
            self._barrier.wait()
            partial.copy_(sum(self._parts[each] for each in sorted(self._parts)))
            self._barrier.wait()
            return partial

        return all_reduce


def split_by_threads(make: Callable[[], Any], size: int) -> list[Any]:
    """A model for each rank, each with its part; raises what ``split`` raises."""
    from kvplug_transformers.model.shards import split

    models, total = [make() for _ in range(size)], Sum(size)
    with ThreadPoolExecutor(size) as threads:
        ends = [
            threads.submit(split, model, rank, size, total.of(rank), "cpu")
            for rank, model in enumerate(models)
        ]
    for end in ends:
        end.result()
    return models


def small(models: Any, name: str, **more: Any) -> Any:
    import torch

    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        initializer_range=0.2,
        pad_token_id=None,
        **more,
    )
    return getattr(models, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),  # biases of q, k and v only
        ("Qwen3", {"head_dim": 8}),  # norms inside heads
    ],
)
def test_the_parts_of_a_model_have_its_heads_and_columns_and_add_up_to_it(models, name, more):
    def make() -> Any:
        import torch

        model = small(models, name, **more)
        for parameter in model.parameters():  # biases are zero at first
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    for part in split_by_threads(make, 3):  # it compares the logits itself
        layer = part.model.layers[1]
        assert layer.self_attn.k_proj.weight.shape == (8, 48)
        assert layer.self_attn.o_proj.weight.shape == (48, 16)
        assert layer.mlp.down_proj.weight.shape == (48, 32)


def test_a_model_with_another_part_that_depends_on_its_heads_is_refused_by_name(models):
    with pytest.raises(UnsupportedError, match="Olmo2ForCausalLM cannot be split over 3 workers"):
        split_by_threads(lambda: small(models, "Olmo2"), 3)


def test_parts_whose_sum_is_another_model_are_refused(models, monkeypatch):
    monkeypatch.setattr(Sum, "of", lambda self, rank: lambda partial: partial)
    with pytest.raises(UnsupportedError, match="its logits then differ by"):
        split_by_threads(lambda: small(models, "Llama"), 3)


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("llama", 3, r"LlamaForCausalLM \(llama\) .* over 3 .* 4 query heads and 2 KV heads and 128 MLP"),
        ("llama", 4, r"2 KV heads. It can be split over 1, 2$"),
        ("gpt2", 2, r"GPT2LMHeadModel \(gpt2\) .* 0 of its 3 layers have the projections k_proj"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_name(request, name, size, why):
    from kvplug_transformers.model.shards import check_split

    with pytest.raises(UnsupportedError, match=why):
        check_split(request.getfixturevalue(name), size)


# -- what crosses between scheduler and workers -------------------------------------------------------


def test_a_request_has_finished_when_every_worker_has_named_it(models):
    from kvplug_transformers.engine.reports import Reports

    def report(*sent: str, received: str = "", bad: frozenset[int] = frozenset()) -> WorkerOutput:
        return WorkerOutput(
            finished_sending=frozenset(sent),
            finished_recving=frozenset(received),
            invalid_block_ids=bad,
            worker_metadata=tuple(sent),
        )

    reports = Reports(3)
    first = reports.merge([report("a", "b"), report("a", bad=frozenset({4})), report("a", received="c")])
    assert (first.finished_sending, first.finished_recving) == ({"a"}, frozenset())
    assert (first.invalid_block_ids, first.worker_metadata) == ({4}, ("a", "b", "a", "a"))
    second = reports.merge([report(received="c"), report("b", bad=frozenset({5})), report("b")])
    assert (second.finished_sending, second.finished_recving, second.invalid_block_ids) == (
        {"b"},
        frozenset(),
        {5},
    )
    third = reports.merge([report("b"), report(received="c"), report()])
    assert (third.finished_sending, third.finished_recving) == (frozenset(), {"c"}), "b was named anew"


def test_the_figures_of_all_workers_are_added_up(models):
    from kvplug.engine import TransferStats
    from kvplug_transformers.engine.reports import Reports

    stats = TransferStats()
    stats.record("load", 100, 0.5)
    merged = Reports(2).merge([WorkerOutput(stats=stats.snapshot()), WorkerOutput()]).stats
    assert merged is not None and merged["ops"]["load"]["bytes"] == 100
    assert Reports(2).merge([WorkerOutput(), WorkerOutput()]).stats is None


def test_a_step_crosses_as_plain_values(models):
    from kvplug_transformers.engine.options import EngineOptions
    from kvplug_transformers.engine.scheduler import Scheduler
    from kvplug_transformers.engine.sequence import Sequence
    from kvplug_transformers.engine.step import Step

    scheduler = Scheduler(EngineOptions(block_size=4, max_tokens_per_step=7))
    for name in "ab":
        scheduler.add(Sequence(request_id=name, prompt=tuple(range(5)), max_new_tokens=2))
    step = scheduler.schedule()
    other = Step.from_plain(decode(encode(step.to_plain())))
    assert other == step


def test_workers_of_one_host_need_no_secret_wherever_the_engine_listens():
    from kvplug_transformers.engine.rank import on_one_host

    config = on_one_host(Config.from_dict({"host": "10.0.0.4"}))
    assert config.host.startswith("unix:")
    assert worker_transports(config) == {"queue": "shm", "communicator": "shm"}


# -- with processes ----------------------------------------------------------------------------------

with_processes = pytest.mark.full


@contextmanager
def workers(folder: Path, timeout_s: float = 30.0, **more: Any) -> Iterator[Any]:
    """Two of them. However they ended, nothing of them may be left."""
    from kvplug_transformers.engine.workers import Workers

    config = Config.from_dict({"role": "both", "timeout_s": timeout_s, "connect_timeout_s": 120})
    with nothing_left():
        made = Workers(folder, config, 2, **more)
        try:
            yield made
        finally:
            made.close()
        assert not [pid for pid in made.pids if Path(f"/proc/{pid}").exists()]


def run(model: Any, count: int, *prompts: range) -> list[list[int]]:
    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.engine.options import EngineOptions

    options = EngineOptions(block_size=8, num_blocks=32, max_tokens_per_step=32)
    if hasattr(model, "open"):
        model = model.open(options)
    engine = Engine(model, options)
    sequences = [engine.add(prompt, max_new_tokens=count) for prompt in prompts]
    for _ in engine.run():
        pass
    return [sequence.output for sequence in sequences]


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("shared")


@with_processes
def test_two_workers_give_the_tokens_of_one_process_and_one_that_is_killed_in_a_step_is_named(folder, models):
    from kvplug_transformers.engine.options import EngineOptions
    from kvplug_transformers.model.load import load

    prompts = (range(40), range(7, 20), range(60, 127))
    with workers(folder) as made:
        assert run(made, 8, *prompts) == run(load(folder).model, 8, *prompts)
        address = f"unix:@kvplug-test-{os.getpid()}"
        sharded = made.open(EngineOptions(), connects=True, listen=f"{address}-0")
        assert sharded.contacts == (f"{address}-0", f"{address}-1")
        shards = [metadata["shard"] for _, metadata in sorted(sharded.handshake_metadata.items())]
        assert [(shard["tensor_rank"], shard["tensor_size"]) for shard in shards] == [(0, 2), (1, 2)]
        victim = made.pids[1]
        os.kill(victim, signal.SIGSTOP)  # the other one waits for it, in the middle of the step
        threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(PeerGoneError, match=rf"worker 1 of 2 \(pid {victim}\) was killed by SIGKILL"):
            run(made, 8, range(40))
        assert time.monotonic() - began < 10
        with pytest.raises(ClosedError):
            run(made, 1, range(3))


@with_processes
def test_a_stopped_worker_is_named_when_the_time_is_up(folder, models):
    with workers(folder, timeout_s=3) as made:
        victim = made.pids[0]
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=rf"worker 0 of 2 \(pid {victim}\) is stopped"):
            run(made, 8, range(40))
        assert 2.9 < time.monotonic() - began < 8


@with_processes
def test_a_worker_that_cannot_load_the_model_is_named_with_its_reason(folder, models, tmp_path):
    from kvplug_transformers.processes import ProcessError

    why = r"worker \d of 2 \(pid \d+\) failed: .* holds no model"
    with pytest.raises(ProcessError, match=why), workers(tmp_path):
        pass


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('no such module')", r"\(pid \d+\) ended with status 1:\nno such module"),
        ("import os; os.kill(os.getpid(), 9)", r"worker \d of 2 \(pid \d+\) was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 19)", r"worker \d of 2 \(pid \d+\) is stopped"),
        ("import sys; sys.stdin.read()", r"worker 0 of 2 \(pid \d+\), worker 1 .* reported nothing"),
    ],
    ids=["fails", "is killed", "is stopped", "hangs"],
)
def test_a_worker_that_does_not_start_is_named(folder, models, program, why):
    command = [sys.executable, "-S", "-c", program]
    with pytest.raises((PeerGoneError, TimeoutError), match=why):  # noqa: SIM117
        with workers(folder, command=command, timeout=1.5):
            pass
