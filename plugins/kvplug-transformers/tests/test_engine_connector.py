"""How the engine calls a connector, and what it does with the answers."""

from __future__ import annotations

import re

import pytest

from kvplug import TimeoutError
from kvplug.engine import RequestEnd
from kvplug_transformers.engine.engine import Engine
from kvplug_transformers.engine.options import cache_config

pytestmark = pytest.mark.timeout(60)


def loaded_up_to(prompt: list[int], block_size: int) -> int:
    return (len(prompt) - 1) // block_size * block_size


def prefill(engine_on, model, *prompts, **options):
    engine = engine_on(model, saves=True, **options)
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=1)
    list(engine.run())
    engine.settle(timeout=5)
    return engine


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"layout": "KBTHD"}, {"layout": "KBHTD"}),
        ({"block_size": 32}, {"block_size": 16}),
        ({"max_tokens_per_step": 7}, {"max_tokens_per_step": 5}),
    ],
    ids=["alike", "another-layout", "another-block-size", "in-chunks"],
)
def test_tokens_decoded_after_a_load_are_those_of_the_model_alone(
    llama, alone, random_prompt, engine_on, theirs, ours, in_background
):
    prompts = [random_prompt(length) for length in (70, 41, 33, 8)]
    prefill(engine_on, llama, *prompts, **theirs)
    engine = engine_on(llama, in_background=in_background, **ours)
    sequences = [engine.add(prompt, max_new_tokens=8) for prompt in prompts]
    list(engine.run())
    assert [sequence.output for sequence in sequences] == [alone(llama, prompt, 8) for prompt in prompts]
    size = engine.options.block_size
    assert [sequence.num_loaded_tokens for sequence in sequences] == [
        loaded_up_to(prompt, size) for prompt in prompts
    ]


def test_gpt2_loads_as_llama_does(gpt2, alone, random_prompt, engine_on):
    prompt = random_prompt(50)
    prefill(engine_on, gpt2, prompt)
    engine = engine_on(gpt2)
    sequence = engine.add(prompt, max_new_tokens=8)
    list(engine.run())
    assert (sequence.output, sequence.num_loaded_tokens) == (alone(gpt2, prompt, 8), 48)


def test_loaded_kv_is_really_used(llama, alone, random_prompt, engine_on, table):
    """The control: with another prompt's KV in its place the tokens differ."""
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    for layers in table.entries.values():
        for key, value in layers:
            key.neg_()
            value.neg_()
    engine = engine_on(llama)
    sequence = engine.add(prompt, max_new_tokens=8)
    list(engine.run())
    assert sequence.num_loaded_tokens == 48
    assert sequence.output != alone(llama, prompt, 8)


def test_another_extra_is_another_key(llama, random_prompt, engine_on):
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    engine = engine_on(llama)
    sequence = engine.add(prompt, max_new_tokens=2, extra=b"an adapter")
    list(engine.run())
    assert sequence.num_loaded_tokens == 0


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("bad", [0, 20, 63])
def test_after_a_failed_load_the_rest_is_recomputed(
    llama, alone, random_prompt, engine_on, table, bad, in_background
):
    prompt, other = random_prompt(70), random_prompt(30)
    prefill(engine_on, llama, prompt, other)
    table.bad_tokens = {bad}
    engine = engine_on(llama, in_background=in_background)
    sequence = engine.add(prompt, max_new_tokens=8)
    list(engine.run())
    assert sequence.output == alone(llama, prompt, 8)
    assert sequence.num_failed_loads == 1
    assert sequence.num_loaded_tokens == bad // 16 * 16
    assert sequence.generation == 1
    assert f"the KV of tokens {bad // 16 * 16} to 64 could not be loaded" in sequence.load_error
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_after_a_failed_load_the_request_ends_where_the_policy_is_to_fail(
    llama, alone, random_prompt, engine_on, table, in_background
):
    prompt, other = random_prompt(70), random_prompt(15)
    prefill(engine_on, llama, prompt)
    table.bad_tokens = {40}
    engine = engine_on(llama, in_background=in_background, load_failure_policy="fail")
    sequence = engine.add(prompt, max_new_tokens=8)
    untouched = engine.add(other, max_new_tokens=8)
    tokens = [token for token in engine.run() if token.request_id == sequence.request_id]
    assert [(token.token_id, token.finish_reason) for token in tokens] == [(None, "error")]
    assert tokens[0].error == "the KV of tokens 32 to 64 could not be loaded, and the policy is to fail"
    assert sequence.output == []
    assert untouched.output == alone(llama, other, 8)
    engine.settle(timeout=5)
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks
    ends = engine.scheduler._connector.ends
    assert ends == {sequence.request_id: RequestEnd.FAILED, untouched.request_id: RequestEnd.FINISHED}


def test_not_yet_is_asked_again_and_lets_others_by(llama, alone, random_prompt, engine_on, table):
    late, other = random_prompt(50), random_prompt(20)
    prefill(engine_on, llama, late)
    engine = engine_on(llama)
    table.not_yet = 1
    first, second = engine.add(late, max_new_tokens=4), engine.add(other, max_new_tokens=4)
    (token,) = engine.step()
    assert token.request_id == second.request_id
    list(engine.run())
    assert (first.num_loaded_tokens, first.output) == (48, alone(llama, late, 4))


def test_while_one_request_loads_in_the_background_others_compute(
    llama, alone, random_prompt, engine_on, table
):
    late, other = random_prompt(50), random_prompt(20)
    prefill(engine_on, llama, late)
    table.steps_to_load = 4
    engine = engine_on(llama, in_background=True)
    first, second = engine.add(late, max_new_tokens=4), engine.add(other, max_new_tokens=8)
    order = [token.request_id for token in engine.run()]
    assert order[:3] == [second.request_id] * 3
    assert (first.output, second.output) == (alone(llama, late, 4), alone(llama, other, 8))


def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_has_ended(
    llama, random_prompt, engine_on, table
):
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    table.steps_to_load = 3
    engine = engine_on(llama, in_background=True)
    sequence = engine.add(prompt, max_new_tokens=4)
    engine.step()
    engine.abort(sequence.request_id)
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks - 3
    assert engine.scheduler.has_pending_connector_work
    engine.settle(timeout=5)
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


def test_a_request_aborted_while_it_loads_is_named_once_and_that_frees_what_the_connector_kept(
    llama, random_prompt, engine_on, table
):
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    table.steps_to_load = 3
    engine = engine_on(llama, in_background=True)
    engine.scheduler._connector.request_finished = lambda *_: (True, None)
    sequence = engine.add(prompt, max_new_tokens=4)
    engine.step()
    engine.abort(sequence.request_id)
    engine.settle(timeout=5)
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks
    assert not engine.scheduler.has_pending_connector_work  # it need not be named as sent as well


def test_a_connector_with_work_under_way_gets_steps_until_it_has_none(llama, random_prompt, engine_on, table):
    engine = engine_on(llama)
    asked = []

    def has_pending_push_work():
        asked.append(table.calls.count("build_connector_meta"))
        return len(asked) < 4

    engine.scheduler._connector.has_pending_push_work = has_pending_push_work
    engine.add(random_prompt(5), max_new_tokens=1)
    list(engine.run())
    assert asked == []  # while a request is left there is no need to ask
    engine.settle(timeout=5)
    assert asked == [2, 3, 4, 5]  # steps so far, the first two for the request and its end


@pytest.mark.parametrize("said", [None, 0, {"a": (1, b"b")}])
def test_what_the_worker_side_says_reaches_the_scheduler_side_as_it_is(llama, random_prompt, engine_on, said):
    engine, heard = engine_on(llama), []
    engine.worker._connector.build_worker_metadata = lambda: said
    engine.scheduler._connector.update_connector_output = lambda output: heard.append(output.worker_metadata)
    engine.add(random_prompt(20), max_new_tokens=1)
    list(engine.run())
    assert heard == [() if said is None else (said,)]


def test_a_connector_whose_work_never_ends_is_not_waited_for_for_ever(llama, random_prompt, engine_on):
    engine = engine_on(llama)
    engine.scheduler._connector.has_pending_push_work = lambda: True
    with pytest.raises(TimeoutError, match="wants more steps"):
        engine.settle(timeout=0.05)


def test_preempted_requests_are_named_before_their_blocks_are_overwritten_and_load_again(
    llama, alone, random_prompt, engine_on
):
    prompts = [random_prompt(length) for length in (40, 40, 40)]
    prefill(engine_on, llama, *prompts)
    engine = engine_on(llama, num_blocks=10)
    sequences = [engine.add(prompt, max_new_tokens=20) for prompt in prompts]
    list(engine.run())
    assert [sequence.output for sequence in sequences] == [alone(llama, prompt, 20) for prompt in prompts]
    preempted = {sequence.request_id for sequence in sequences if sequence.num_preemptions}
    assert preempted
    assert engine.worker._connector.preempted == preempted


STEP = (
    r"build_connector_meta (handle_preemptions )?bind_connector_metadata start_load_kv "
    r"((wait_for_layer_load save_kv_layer ){3})?wait_for_save get_finished get_block_ids_with_load_errors "
    r"get_stats worker\.take_events build_worker_metadata clear_connector_metadata update_connector_output "
    r"(request_finished )*take_events "
)
ADMIT = r"(get_num_new_matched_tokens |(get_num_new_matched_tokens )?update_state_after_alloc )*"
START = r"register_kv_caches get_handshake_metadata set_xfer_handshake_metadata get_finished_count "


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_the_calls_come_in_the_documented_order(llama, random_prompt, engine_on, table, in_background):
    prompts = [random_prompt(length) for length in (50, 20, 33)]
    prefill(engine_on, llama, *prompts)
    table.calls.clear()
    engine = engine_on(llama, in_background=in_background, num_blocks=9, max_tokens_per_step=20)
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=20)
    while engine.scheduler.has_requests or engine.scheduler.has_pending_connector_work:
        engine.step()
    calls = " ".join(table.calls) + " "
    whole = rf"{START}(on_new_request ){{3}}({ADMIT}{STEP})+"
    assert re.fullmatch(whole, calls), calls
    assert table.calls.count("request_finished") == 3
    assert "handle_preemptions" in table.calls


def test_an_asynchronous_load_tells_the_connector_twice_of_its_blocks(llama, random_prompt, engine_on, table):
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    table.calls.clear()
    engine = engine_on(llama, in_background=True)
    engine.add(prompt, max_new_tokens=1)
    list(engine.run())
    assert table.calls.count("update_state_after_alloc") == 2
    assert table.calls.count("get_num_new_matched_tokens") == 1


def test_a_connector_that_prefers_one_tensor_for_all_layers_gets_it_and_nothing_else(llama, engine_on):
    given = []
    worker = type(engine_on(llama).worker._connector)

    class OneTensor(worker):  # type: ignore[misc, valid-type]
        prefer_cross_layer_blocks = True

        def register_cross_layers_kv_cache(self, kv_cache, layout):
            layout.check(kv_cache)
            given.append((kv_cache, layout))

        def register_kv_caches(self, kv_caches):
            raise AssertionError("exactly one of the two is called")

    like = engine_on(llama)
    connector = OneTensor(like.worker._connector.table, like_cache(like))
    engine = Engine(
        llama,
        like.options,
        facts=like.facts,
        scheduler_connector=like.scheduler._connector,
        worker_connector=connector,
    )
    ((tensor, layout),) = given
    assert layout.axes == "LKBTHD"
    assert tensor.data_ptr() == engine.worker.pages.tensor.data_ptr()


def like_cache(engine):
    return cache_config(engine.facts, engine.options)


def test_one_side_of_a_connector_alone_is_refused(llama, engine_on):
    with pytest.raises(ValueError, match="both sides of a connector, or neither"):
        Engine(llama, scheduler_connector=engine_on(llama).scheduler._connector)


def test_shutdown_ends_both_sides(llama, engine_on):
    engine = engine_on(llama)
    engine.shutdown()
    assert (engine.scheduler._connector.closed, engine.worker._connector.closed) == (1, 1)
