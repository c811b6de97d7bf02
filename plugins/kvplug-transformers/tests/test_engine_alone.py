"""The engine without a connector says what the model running alone says."""

from __future__ import annotations

import pytest

from kvplug_transformers.engine.engine import Engine
from kvplug_transformers.engine.options import EngineOptions

pytestmark = pytest.mark.timeout(60)

LENGTHS = (5, 40, 77, 16)


@pytest.mark.parametrize("layout", ["KBTHD", "KBHTD"])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_several_requests_at_once_get_the_tokens_of_the_model_alone(
    request, alone, random_prompt, family, block_size, layout
):
    model = request.getfixturevalue(family)
    prompts = [random_prompt(length) for length in LENGTHS]
    engine = Engine(model, EngineOptions(block_size=block_size, layout=layout))
    sequences = [engine.add(prompt, max_new_tokens=10) for prompt in prompts]
    tokens = list(engine.run())
    assert [sequence.output for sequence in sequences] == [alone(model, prompt, 10) for prompt in prompts]
    for sequence in sequences:
        own = [token for token in tokens if token.request_id == sequence.request_id]
        assert [token.token_id for token in own] == sequence.output
        assert [token.finish_reason for token in own] == [None] * 9 + ["length"]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_computed_in_chunks_gives_the_same_tokens(llama, alone, random_prompt, chunk):
    prompts = [random_prompt(40), random_prompt(23)]
    engine = Engine(llama, EngineOptions(max_tokens_per_step=chunk))
    sequences = [engine.add(prompt, max_new_tokens=6) for prompt in prompts]
    list(engine.run())
    assert [sequence.output for sequence in sequences] == [alone(llama, prompt, 6) for prompt in prompts]


def test_no_step_computes_more_tokens_than_it_may(llama, random_prompt):
    engine = Engine(llama, EngineOptions(max_tokens_per_step=9))
    for length in LENGTHS:
        engine.add(random_prompt(length), max_new_tokens=4)
    while engine.scheduler.has_requests:
        step = engine.scheduler.schedule()
        counts = [one.num_scheduled_tokens for one in step.output.scheduled]
        assert 0 < sum(counts) <= 9
        engine.scheduler.update(step, *engine.worker.execute(step))


def test_when_blocks_run_out_the_youngest_starts_over_and_all_end_the_same(llama, alone, random_prompt):
    prompts = [random_prompt(length) for length in LENGTHS]
    engine = Engine(llama, EngineOptions(block_size=16, num_blocks=8))
    sequences = [engine.add(prompt, max_new_tokens=20) for prompt in prompts]
    list(engine.run())
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert sequences[0].num_preemptions == 0
    assert [sequence.output for sequence in sequences] == [alone(llama, prompt, 20) for prompt in prompts]
    assert engine.scheduler.num_free_blocks == 8


def test_no_more_requests_have_blocks_than_may(llama, random_prompt):
    engine = Engine(llama, EngineOptions(max_requests=2))
    for length in LENGTHS:
        engine.add(random_prompt(length), max_new_tokens=4)
    while engine.scheduler.has_requests:
        step = engine.scheduler.schedule()
        assert len(step.output.scheduled) <= 2
        engine.scheduler.update(step, *engine.worker.execute(step))


def test_an_end_token_ends_the_request_and_is_part_of_the_output(llama, alone, random_prompt):
    prompt = random_prompt(30)
    stop = alone(llama, prompt, 10)[4]
    engine = Engine(llama)
    sequence = engine.add(prompt, max_new_tokens=10, stop_token_ids=[stop])
    *_, last = engine.run()
    assert sequence.output == alone(llama, prompt, 10, stop=stop)
    assert last.finish_reason == sequence.finish_reason == "stop"


def test_an_aborted_request_gives_its_blocks_back_and_disturbs_nobody(llama, alone, random_prompt):
    engine = Engine(llama, EngineOptions(num_blocks=32))
    first = engine.add(random_prompt(40), max_new_tokens=50)
    prompt = random_prompt(20)
    second = engine.add(prompt, max_new_tokens=8)
    engine.step()
    assert engine.abort(first.request_id).finish_reason == "abort"
    assert engine.abort(first.request_id) is None
    list(engine.run())
    assert second.output == alone(llama, prompt, 8)
    assert engine.scheduler.num_free_blocks == 32


def test_the_model_is_as_it_was_after_each_step(llama, alone, random_prompt):
    prompt = random_prompt(20)
    before = alone(llama, prompt, 5)
    engine = Engine(llama)
    engine.add(prompt, max_new_tokens=5)
    engine.step()
    assert alone(llama, prompt, 5) == before


def test_what_cannot_be_served_is_refused_with_its_numbers(llama, random_prompt):
    engine = Engine(llama, EngineOptions(num_blocks=4, block_size=16))
    with pytest.raises(ValueError, match=r"510 tokens and 10 new ones do not fit the model's context of 512"):
        engine.add(random_prompt(510), max_new_tokens=10)
    with pytest.raises(ValueError, match=r"can grow to 5 blocks of 16 tokens, and the whole cache has 4"):
        engine.add(random_prompt(60), max_new_tokens=10)
    with pytest.raises(ValueError, match="at least one prompt token"):
        engine.add([], max_new_tokens=10)
    engine.add(random_prompt(5), max_new_tokens=1, request_id="a")
    with pytest.raises(ValueError, match="there is a request 'a' already"):
        engine.add(random_prompt(5), max_new_tokens=1, request_id="a")
