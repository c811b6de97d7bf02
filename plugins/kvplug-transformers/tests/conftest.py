"""Tiny models, and a fake connector that keeps KV in a dict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from kvplug.engine import (
    BlockIds,
    KVCacheConfig,
    Plain,
    Request,
    RequestEnd,
    SchedulerConnector,
    SchedulerOutput,
    WorkerConnector,
    WorkerOutput,
    gather,
    scatter,
)
from kvplug_transformers.engine.engine import Engine
from kvplug_transformers.engine.options import EngineOptions, cache_config
from kvplug_transformers.model.facts import describe

torch.set_num_threads(1)
logging.set_verbosity_error()

VOCABULARY = 128


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    # With the usual initializer_range of 0.02 every argmax is the same token.
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def generate(model: Any, prompt: list[int], count: int, stop: int | None = None) -> list[int]:
    """The tokens that transformers itself generates. Without the mask it would mask tokens equal to the
    pad token.
    """
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=stop, pad_token_id=0
        ),
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def tiny(llama, tmp_path_factory) -> Callable[[str], Path]:
    """``tiny(name)``: a folder with a model and a tokenizer of a hundred words. Weights differ by name."""

    def make(name: str, **changes: int) -> Path:
        folder = tmp_path_factory.mktemp(name)
        config = type(llama.config)(**{**llama.config.to_dict(), **changes})
        torch.manual_seed(sum(name.encode()))
        LlamaForCausalLM(config).save_pretrained(folder)
        words = {f"w{number}": number for number in range(100)} | {"?": 100}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def alone() -> Callable[..., list[int]]:
    """``alone(model, prompt, count)``: the tokens of the model running alone."""
    return generate


@pytest.fixture
def random_prompt() -> Callable[[int], list[int]]:
    generator = torch.Generator().manual_seed(7)
    return lambda length: torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


class KVTable:
    """The state that two engines share: prompts and their KV, as lists of (key, value) for each layer."""

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, tuple[int, ...]], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.calls: list[str] = []
        self.bad_tokens: set[int] = set()
        """Tokens at these positions fail to load."""
        self.not_yet = 0
        """How many times a match is answered with "ask again"."""
        self.steps_to_load = 3
        """The number of steps that an asynchronous load takes."""
        self.lock = threading.Lock()

    def match(self, extra: bytes, tokens: tuple[int, ...]) -> int:
        def common(held: tuple[int, ...]) -> int:
            count = 0
            for ours, theirs in zip(tokens, held, strict=False):
                if ours != theirs:
                    break
                count += 1
            return count

        return max((common(held) for its, held in self.entries if its == extra), default=0)

    def take(self, extra: bytes, tokens: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        for (its, held), layers in self.entries.items():
            if its == extra and held[: len(tokens)] == tokens:
                return layers
        raise LookupError("it is gone")


class TableScheduler(SchedulerConnector):
    def __init__(self, table: KVTable, cache: KVCacheConfig, *, saves: bool, in_background: bool) -> None:
        self.table, self.saves, self.in_background = table, saves, in_background
        self.block_size = cache.groups[0].block_size
        self.requests: dict[str, Request] = {}
        self.loads: list[dict[str, Any]] = []
        self.ends: dict[str, RequestEnd] = {}
        self.closed = 0

    def _note(self, call: str) -> None:
        self.table.calls.append(call)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        self._note("set_xfer_handshake_metadata")

    def get_finished_count(self) -> int | None:
        self._note("get_finished_count")
        return None

    def on_new_request(self, request: Request) -> None:
        self._note("on_new_request")
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._note("get_num_new_matched_tokens")
        if self.table.not_yet:
            self.table.not_yet -= 1
            return None, False
        usable = (len(request.token_ids) - 1) // self.block_size * self.block_size
        held = self.table.match(request.extra, request.token_ids[:usable])
        new = held // self.block_size * self.block_size - num_computed_tokens
        return (new, self.in_background) if new > 0 and not self.saves else (0, False)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._note("update_state_after_alloc")
        self.requests[request.request_id] = request
        if num_external_tokens:
            self.loads.append(
                {
                    "id": request.request_id,
                    "extra": request.extra,
                    "tokens": request.token_ids[:num_external_tokens],
                    "blocks": block_ids[0],
                }
            )

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        self._note("build_connector_meta")
        saves = []
        for one in output.scheduled if self.saves else ():
            request = self.requests[one.request_id]
            end = min(one.num_computed_tokens + one.num_scheduled_tokens, request.num_prompt_tokens)
            if one.num_computed_tokens < end:
                saves.append(
                    {
                        "id": one.request_id,
                        "extra": request.extra,
                        "tokens": request.token_ids[: request.num_prompt_tokens],
                        "blocks": output.block_ids(one.request_id)[0],
                        "end": end,
                    }
                )
        loads, self.loads = self.loads, []
        return {"loads": loads, "saves": saves, "in_background": self.in_background}

    def update_connector_output(self, output: WorkerOutput) -> None:
        self._note("update_connector_output")

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished")
        assert request.request_id not in self.ends, "request_finished comes once"
        self.ends[request.request_id] = end
        return False, {"ended": end.value}

    def take_events(self) -> tuple[()]:
        self._note("take_events")
        return ()

    def shutdown(self) -> None:
        self.closed += 1


class TableWorker(WorkerConnector):
    def __init__(self, table: KVTable, cache: KVCacheConfig) -> None:
        super().__init__()
        self.table, self.group = table, cache.groups[0]
        self.layout = self.group.layout
        self.caches: dict[str, torch.Tensor] = {}
        self.preempted: set[str] = set()
        self.under_way: dict[str, list[Any]] = {}
        self.received: set[str] = set()
        self.invalid: set[int] = set()
        self.closed = 0

    def _note(self, call: str) -> None:
        self.table.calls.append(call)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._note("register_kv_caches")
        assert tuple(kv_caches) == self.group.layer_names
        for tensor in kv_caches.values():
            self.layout.check(tensor)
        self.caches = dict(kv_caches)

    def get_handshake_metadata(self) -> Plain:
        self._note("get_handshake_metadata")
        return None

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        self._note("handle_preemptions")
        self.preempted |= request_ids

    def bind_connector_metadata(self, metadata: Plain) -> None:
        self._note("bind_connector_metadata")
        super().bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        self._note("clear_connector_metadata")
        super().clear_connector_metadata()

    def start_load_kv(self) -> None:
        self._note("start_load_kv")
        assert isinstance(self._metadata, dict)
        if self._metadata["in_background"]:
            for load in self._metadata["loads"]:
                self.under_way[load["id"]] = [self.table.steps_to_load, load]

    def _load(self, load: dict[str, Any], layer: int) -> None:
        key, value = self.table.take(load["extra"], load["tokens"])[layer]
        size = self.layout.block_size
        for index in range(len(load["tokens"]) // size):
            span = range(index * size, (index + 1) * size)
            if self.table.bad_tokens.intersection(span):
                self.invalid.add(load["blocks"][index])
                continue
            cache = self.caches[self.group.layer_names[layer]]
            part = slice(span.start, span.stop)
            scatter(cache, self.layout, load["blocks"], span.start, key[part], value[part])

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load")
        assert isinstance(self._metadata, dict)
        if not self._metadata["in_background"]:
            for load in self._metadata["loads"]:
                self._load(load, self.group.layer_names.index(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        self._note("save_kv_layer")
        assert isinstance(self._metadata, dict)
        assert kv_layer.data_ptr() == self.caches[layer_name].data_ptr()
        for save in self._metadata["saves"]:
            if save["end"] == len(save["tokens"]):
                entry = self.table.entries.setdefault((save["extra"], save["tokens"]), [])
                assert len(entry) in (self.group.layer_names.index(layer_name), len(self.caches))
                if len(entry) < len(self.caches):
                    entry.append(gather(kv_layer, self.layout, save["blocks"], 0, save["end"]))

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        self._note("get_finished")
        received = set()
        for request_id, item in list(self.under_way.items()):
            item[0] -= 1
            if item[0] <= 0:
                for layer in range(len(self.caches)):
                    self._load(item[1], layer)
                received.add(request_id)
                del self.under_way[request_id]
        return frozenset(), frozenset(received)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        self._note("get_block_ids_with_load_errors")
        invalid, self.invalid = self.invalid, set()
        return frozenset(invalid)

    def get_stats(self) -> None:
        self._note("get_stats")

    def take_events(self) -> tuple[()]:
        self._note("worker.take_events")
        return ()

    def build_worker_metadata(self) -> Plain:
        self._note("build_worker_metadata")
        return None

    def shutdown(self) -> None:
        self.closed += 1


@pytest.fixture
def table() -> KVTable:
    return KVTable()


@pytest.fixture
def engine_on(table: KVTable) -> Callable[..., Engine]:
    """``engine_on(model, saves=…, in_background=…, **options)``: an engine whose connector is the table's."""

    def make(model: Any, *, saves: bool = False, in_background: bool = False, **options: Any) -> Engine:
        facts, wanted = describe(model), EngineOptions(**options)
        cache = cache_config(facts, wanted)
        return Engine(
            model,
            wanted,
            facts=facts,
            scheduler_connector=TableScheduler(table, cache, saves=saves, in_background=in_background),
            worker_connector=TableWorker(table, cache),
        )

    return make
