"""What the connector "lookup" refuses to load or to save, so that nothing is wrong and looks right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import faulty_engines as engines
from kvplug import IntegrityError
from kvplug.engine import KVLayout, LayoutError, RequestEnd
from kvplug.transport import EntryHeader
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.plan import LoadPlan
from kvplug_testing.engine import FakeEngine, request_of

config, pair, tokens, promised = engines.config, engines.pair, engines.tokens, engines.promised
made, ASYNC, KV_OF_100_TOKENS = engines.made, engines.ASYNC, engines.KV_OF_100_TOKENS
load = engines.load

pytestmark = pytest.mark.timeout(60)

# -- wrong KV ------------------------------------------------------------------------------------


def test_what_was_computed_beside_a_failed_load_in_shared_blocks_is_not_saved() -> None:
    options = {"lookup": {"max_unsaved": 1 << 30}}
    small = {"buffer_size": int(1.2 * KV_OF_100_TOKENS), "options": options}
    with FakeEngine(config("both", host="unix:@kvplug-test-shared", **small)) as engine:
        engine.prefill(request_of("stored", tokens(100)))
        first = promised(engine, request_of("first", tokens(100)), 96)
        other = torch.zeros(3, 100, 2, 8)
        engine.worker._store.insert(tokens(100, 5000), None, other, other, None)  # the promise is void
        # Its engine has a prefix cache: the first 96 tokens are the blocks that the other one loads.
        sharing = request_of("sharing", [*tokens(96), 7, 7, 7, 7])
        engine.scheduler.on_new_request(sharing)
        blocks = (*first[1][:6], *engine.allocate(4))
        engine.scheduler.update_state_after_alloc(sharing, (blocks,), 0)
        report = engine.step([first, (sharing, blocks, 96, 4)])
        assert report.invalid_block_ids == frozenset(blocks[:6])
        assert engine.matched(request_of("asking", sharing.token_ids))[0] == 0
        # The engine computes it again, and what is right is saved.
        engine.step([(sharing, blocks, 0, 100)])
        again, loaded, _ = engine.load(request_of("again", sharing.token_ids))
        assert loaded == 96
        assert engine.is_right(sharing.token_ids, again, 100)


def test_a_prompt_whose_engine_went_back_is_gathered_again_from_there() -> None:
    with pair() as (prefill, decode):
        prompt = request_of("a", tokens(100))
        blocks = prefill.allocate(100)
        prefill.scheduler.on_new_request(prompt)
        prefill.scheduler.update_state_after_alloc(prompt, (blocks,), 0)
        prefill.compute(prompt.token_ids, blocks, 0, 16)
        prefill.step([(prompt, blocks, 0, 64)], compute=False)  # from token 16 on it is not its KV
        prefill.step([(prompt, blocks, 16, 84)])
        there, loaded, _ = decode.load(request_of("b", tokens(100)))
        assert loaded == 96
        assert decode.is_right(prompt.token_ids, there, 100)


def header(token_ids: Any, roi: Any = None, **metadata: Any) -> EntryHeader:
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    mask = torch.ones(len(ids), dtype=torch.bool) if roi is None else torch.tensor(roi)
    return EntryHeader(entry_id=1, tokens=ids, roi=mask, num_layers=1, metadata=metadata)


@pytest.mark.parametrize(
    "wrong",
    [
        header(tokens(31)),
        header([*tokens(31), 99]),
        header([99, *tokens(32)], [False] + [True] * 32),
        header(tokens(33), [True] * 31 + [False, True]),
    ],
)
def test_an_entry_of_other_tokens_than_those_promised_is_refused(load: Load, wrong: EntryHeader) -> None:
    with pytest.raises(IntegrityError, match="tokens"):
        load.begin(wrong)


def test_a_layer_of_fewer_tokens_than_promised_is_refused(load: Load) -> None:
    load.begin(header(tokens(40)))
    with pytest.raises(IntegrityError, match="31 tokens"):
        load.layer(0, torch.zeros(31, 1, 4), torch.zeros(31, 1, 4))
    with pytest.raises(IntegrityError, match="31 tokens"):
        load.layer(0, torch.zeros(40, 1, 4), torch.zeros(31, 1, 4))


def test_an_entry_whose_hashes_are_missing_or_no_hashes_is_refused() -> None:
    layout = KVLayout("KBTHD", {"K": 2, "B": 8, "T": 16, "H": 1, "D": 4})
    plan = LoadPlan(
        request_id="a", token_ids=tuple(tokens(16)), extra=b"", block_ids=(1,), start=0, in_background=False
    )
    for layers in (None, [], [1], "x"):
        load = made(plan, layout, (torch.zeros(layout.shape),), checksum="xxh3_64")
        with pytest.raises(IntegrityError, match="hash"):
            load.begin(header(tokens(16), checksum="xxh3_64", layers=layers))


def test_a_cache_that_was_allocated_in_inference_mode_is_loaded_into() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        with torch.inference_mode():
            decode.kv_caches.update({name: kv.clone() for name, kv in decode.kv_caches.items()})
            decode.worker.register_kv_caches(decode.kv_caches)
            blocks, loaded, report = decode.load(request_of("a", tokens(100)))
            assert loaded == 96 and not report.invalid_block_ids
            assert decode.is_right(tuple(tokens(100)), blocks, 100)


def test_a_load_before_the_cache_is_known_is_refused() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        scheduled = promised(decode, request_of("a", tokens(100)), 96)
        decode.worker._caches = ()
        with pytest.raises(LayoutError, match="register_kv_caches"):
            decode.step([scheduled])


def test_a_layer_without_a_cache_is_named() -> None:
    with FakeEngine(config("producer"), listen="unix:") as prefill:
        missing = dict(prefill.kv_caches)
        del missing["layers.1"]
        with pytest.raises(LayoutError, match=r"layers\.1"):
            prefill.worker.register_kv_caches(missing)


# -- requests that end ---------------------------------------------------------------------------


def test_an_abort_before_the_step_that_would_load_keeps_no_blocks() -> None:
    with pair(consumer=ASYNC) as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        prompt, blocks, *_ = promised(decode, request_of("a", tokens(100)), 96)
        keeps, _ = decode.scheduler.request_finished(prompt, (blocks,), RequestEnd.ABORTED)
        assert not keeps  # nobody would ever name it
        for _ in range(3):
            report = decode.step([])
            assert not report.finished_recving and not report.invalid_block_ids


def test_an_id_that_is_used_again_at_once_is_a_new_request() -> None:
    with pair() as (prefill, decode):
        prefill.prefill(request_of("stored", tokens(100)))
        prefill.prefill(request_of("stored", tokens(100, first=1000)))
        first = promised(decode, request_of("a", tokens(100)), 96)
        decode.scheduler.request_finished(first[0], (first[1],), RequestEnd.ABORTED)
        second = promised(decode, request_of("a", tokens(100, first=1000)), 96)
        report = decode.step([second])
        assert not report.invalid_block_ids
        assert decode.is_right(second[0].token_ids, second[1], 100)
