"""Tiny models, and a connector that keeps KV in a dict.

transformers takes seconds to import, so only fixtures import it, and tests with models run in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as ManyOf
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvplug.engine import (
    BlockIds,
    KVCacheConfig,
    Plain,
    Request,
    RequestEnd,
    SchedulerConnector,
    SchedulerOutput,
    WorkerConnector,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.engine.sequence import Sequence

SMALL = {
    "vocab_size": 128,
    "initializer_range": 0.2,  # with the usual 0.02 every argmax is the same token
    "bos_token_id": None,
    "eos_token_id": None,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            marks = [mark.name for mark in item.iter_markers()]
            if item.path.parent == Path(__file__).parent and "full" not in marks:
                item.add_marker(pytest.mark.xdist_group("transformers"))


@pytest.fixture(scope="session")
def models():
    """The module transformers, quiet, and torch with one thread."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    return transformers


@pytest.fixture(scope="session")
def llama(models):
    import torch

    torch.manual_seed(0)
    config = models.LlamaConfig(
        **SMALL,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return models.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def gpt2(models):
    import torch

    torch.manual_seed(0)
    config = models.GPT2Config(**SMALL, n_embd=64, n_layer=3, n_head=4, n_positions=512)
    return models.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="session")
def tiny(models, llama, tmp_path_factory) -> Callable[..., Path]:
    """``tiny(name)``: a folder with a model and a tokenizer of a hundred words. Weights differ by name."""
    import torch
    from tokenizers import Tokenizer, models as tokenizers, pre_tokenizers

    def make(name: str, **changes: int) -> Path:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(sum(name.encode()))
        models.LlamaForCausalLM(models.LlamaConfig(**{**llama.config.to_dict(), **changes})).save_pretrained(
            folder
        )
        words = {f"w{number}": number for number in range(100)} | {"?": 100}
        tokenizer = Tokenizer(tokenizers.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        models.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
        return folder

    return make


# -- a connector -------------------------------------------------------------------------------------


class KVTable:
    """What engines share: the KV of whole prompts, as (key, value) of each layer."""

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, tuple[int, ...]], list[tuple[Tensor, Tensor]]] = {}
        self.calls: list[str] = []
        self.bad_tokens: set[int] = set()
        """Tokens at these positions fail to load."""
        self.not_yet = 0
        """How many times a match is answered with "ask again"."""
        self.steps_to_load = 3
        """The number of steps that an asynchronous load takes."""
        self.scheduler: TableScheduler
        """Of the newest engine, as is the worker."""
        self.worker: TableWorker

    def match(self, extra: bytes, tokens: tuple[int, ...]) -> int:
        def common(held: tuple[int, ...]) -> int:
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, held, strict=False)))

        return max((common(held) for its, held in self.entries if its == extra), default=0)

    def take(self, extra: bytes, tokens: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        found = (
            kv for (its, held), kv in self.entries.items() if (its, held[: len(tokens)]) == (extra, tokens)
        )
        return next(found)


def notes(names: str, prefix: str = "") -> Callable[[type], type]:
    """A class decorator: calls of these methods are noted in the table."""

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            self.table.calls.append(prefix + name)
            return method(self, *args)

        return call

    def decorate(kind: type) -> type:
        for name in names.split():
            setattr(kind, name, noting(name, getattr(kind, name)))
        return kind

    return decorate


@notes(
    "set_xfer_handshake_metadata on_new_request get_num_new_matched_tokens"
    " update_state_after_alloc build_connector_meta update_connector_output request_finished take_events"
)
class TableScheduler(SchedulerConnector):
    def __init__(self, table: KVTable, cache: KVCacheConfig, *, saves: bool, in_background: bool) -> None:
        self.table, self.saves, self.in_background = table, saves, in_background
        self.block_size = cache.groups[0].block_size
        self.requests: dict[str, Request] = {}
        self.loads: list[tuple[Request, int, tuple[int, ...]]] = []
        self.ends: dict[str, RequestEnd] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
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
        self.requests[request.request_id] = request
        if num_external_tokens:
            self.loads.append((request, num_external_tokens, block_ids[0]))

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        saves = []
        for one in output.scheduled if self.saves else ():
            request, computed = self.requests[one.request_id], one.num_computed_tokens
            if computed < request.num_prompt_tokens <= computed + one.num_scheduled_tokens:
                saves.append((request, output.block_ids(one.request_id)[0]))
        loads, self.loads = self.loads, []
        return {"loads": loads, "saves": saves, "in_background": self.in_background}

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        assert request.request_id not in self.ends, "request_finished comes once"
        self.ends[request.request_id] = end
        return False, {"ended": end.value}

    def shutdown(self) -> None:
        pass


@notes(
    "register_kv_caches get_handshake_metadata handle_preemptions bind_connector_metadata start_load_kv"
    " wait_for_layer_load save_kv_layer wait_for_save get_finished get_block_ids_with_load_errors get_stats"
    " build_worker_metadata clear_connector_metadata"
)
@notes("take_events", "worker.")
class TableWorker(WorkerConnector):
    def __init__(self, table: KVTable, cache: KVCacheConfig) -> None:
        super().__init__()
        self.table, self.group, self.layout = table, cache.groups[0], cache.groups[0].layout
        self.caches: dict[str, Tensor] = {}
        self.preempted: set[str] = set()
        self.under_way: dict[str, list[Any]] = {}
        """Steps until the load of a request ends, and the load."""
        self.invalid: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        assert tuple(kv_caches) == self.group.layer_names
        for tensor in kv_caches.values():
            self.layout.check(tensor)
        self.caches = dict(kv_caches)

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        self.preempted |= request_ids

    def start_load_kv(self) -> None:
        if self._metadata["in_background"]:
            for load in self._metadata["loads"]:
                self.under_way[load[0].request_id] = [self.table.steps_to_load, load]

    def _load(self, load: tuple[Request, int, tuple[int, ...]], layers: Iterable[str]) -> None:
        request, num_tokens, blocks = load
        held = self.table.take(request.extra, request.token_ids[:num_tokens])
        size = self.layout.block_size
        for name in layers:
            key, value = held[self.group.layer_names.index(name)]
            for start in range(0, num_tokens, size):
                part = slice(start, start + size)
                if self.table.bad_tokens.intersection(range(start, start + size)):
                    self.invalid.add(blocks[start // size])
                else:
                    self.layout.scatter(self.caches[name], blocks, start, key[part], value[part])

    def wait_for_layer_load(self, layer_name: str) -> None:
        if not self._metadata["in_background"]:
            for load in self._metadata["loads"]:
                self._load(load, [layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        assert kv_layer.data_ptr() == self.caches[layer_name].data_ptr()
        layer = self.group.layer_names.index(layer_name)
        for request, blocks in self._metadata["saves"]:
            prompt = request.token_ids[: request.num_prompt_tokens]
            entry = self.table.entries.setdefault((request.extra, prompt), [])
            assert len(entry) in (layer, len(self.caches))
            if len(entry) == layer:
                entry.append(self.layout.gather(kv_layer, blocks, 0, len(prompt)))

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        for item in self.under_way.values():
            item[0] -= 1
        received = {request_id for request_id, (left, _) in self.under_way.items() if left <= 0}
        for request_id in received:
            self._load(self.under_way.pop(request_id)[1], self.caches)
        return frozenset(), frozenset(received)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        invalid, self.invalid = self.invalid, set()
        return frozenset(invalid)

    def shutdown(self) -> None:
        pass


def generate(model: Any, prompt: ManyOf[int], count: int, stop: int | None = None) -> list[int]:
    """The tokens of transformers itself."""
    import torch
    from transformers import GenerationConfig

    output = model.generate(
        torch.tensor([prompt]),
        # Without it, tokens equal to the pad token would be masked.
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=stop, pad_token_id=0
        ),
    )
    return output[0, len(prompt) :].tolist()


generate_once = cache(generate)
"""Tests have many prompts in common."""


class Rig:
    """A model, engines that run it, and the table that their connectors share."""

    def __init__(self, model: Any) -> None:
        import torch

        self.model = model
        self.table = KVTable()
        self._random = torch.Generator().manual_seed(7)
        self.alone = partial(generate, model)

    def prompt(self, length: int) -> list[int]:
        import torch

        vocabulary = self.model.config.vocab_size
        return torch.randint(0, vocabulary, (length,), generator=self._random).tolist()

    def expect(self, *sequences: Sequence) -> None:
        """Their tokens are those of the model running alone."""
        outputs = [sequence.output for sequence in sequences]
        assert outputs == [generate_once(self.model, one.prompt, one.max_new_tokens) for one in sequences]

    def engine(
        self,
        *,
        saves: bool = False,
        in_background: bool | None = None,
        worker: Callable[..., TableWorker] = TableWorker,
        **options: Any,
    ) -> Engine:
        """An engine. With ``saves`` or ``in_background``, it has a connector to the table, whose
        worker side ``worker`` makes.
        """
        from kvplug_transformers.engine.engine import Engine
        from kvplug_transformers.engine.options import EngineOptions, cache_config
        from kvplug_transformers.engine.worker import Worker
        from kvplug_transformers.model.facts import describe

        wanted, table = EngineOptions(**options), self.table
        if not saves and in_background is None:
            return Engine(self.model, wanted)
        facts = describe(self.model)
        cache = cache_config(facts, wanted)
        table.scheduler = TableScheduler(table, cache, saves=saves, in_background=bool(in_background))
        table.worker = worker(table, cache)
        return Engine(
            Worker(self.model, facts, wanted, table.worker), wanted, scheduler_connector=table.scheduler
        )

    def run(self, engine: Engine, prompts: Iterable[list[int]], count: int) -> list[Sequence]:
        """Generate ``count`` tokens for each prompt."""
        sequences = [engine.add(prompt, max_new_tokens=count) for prompt in prompts]
        list(engine.run())
        return sequences

    def prefill(self, *prompts: list[int], **options: Any) -> None:
        """Put the KV of these prompts into the table."""
        engine = self.engine(saves=True, **options)
        self.run(engine, prompts, 1)
        engine.settle(timeout=5)
        self.table.calls.clear()


@pytest.fixture
def rig(models, request: pytest.FixtureRequest) -> Rig:
    """A rig of the model "llama", or of the one that an indirect parameter names."""
    return Rig(request.getfixturevalue(getattr(request, "param", "llama")))
