"""The engine without a connector generates what the model running alone generates."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(60)

LENGTHS = (5, 40, 77, 16)


@pytest.mark.parametrize(
    ("rig", "options"),
    [
        ("llama", {"block_size": 16, "layout": "KBTHD"}),
        ("llama", {"block_size": 32, "layout": "KBHTD"}),
        ("gpt2", {"block_size": 16, "layout": "KBHTD"}),
        ("gpt2", {"block_size": 32, "layout": "KBTHD"}),
        ("llama", {"max_tokens_per_step": 1}),
        ("llama", {"max_tokens_per_step": 7}),
    ],
    ids=str,
    indirect=["rig"],
)
def test_several_requests_at_once_get_the_tokens_of_the_model_alone(rig, options):
    engine = rig.engine(**options)
    lengths = LENGTHS[:2] if options.get("max_tokens_per_step") == 1 else LENGTHS
    sequences = [engine.add(rig.prompt(length), max_new_tokens=10) for length in lengths]
    tokens = list(engine.run())
    rig.expect(*sequences)
    for sequence in sequences:
        own = [token for token in tokens if token.request_id == sequence.request_id]
        assert [token.token_id for token in own] == sequence.output
        assert [token.finish_reason for token in own] == [None] * 9 + ["length"]


@pytest.mark.parametrize(("most_tokens", "most_requests"), [(9, 8), (512, 2)])
def test_no_step_exceeds_the_limits_of_tokens_and_requests(rig, most_tokens, most_requests):
    engine = rig.engine(max_tokens_per_step=most_tokens, max_requests=most_requests)
    for length in LENGTHS:
        engine.add(rig.prompt(length), max_new_tokens=4)
    while engine.scheduler.has_requests:
        step = engine.scheduler.schedule()
        counts = [one.num_scheduled_tokens for one in step.scheduled]
        assert 0 < sum(counts) <= most_tokens
        assert len(counts) <= most_requests
        sampled, output, _ = engine.worker.execute(step)
        engine.scheduler.update(step, sampled, output)


def test_when_blocks_run_out_the_youngest_starts_over_and_all_end_the_same(rig):
    engine = rig.engine(block_size=16, num_blocks=8)
    sequences = rig.run(engine, map(rig.prompt, LENGTHS), 20)
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert sequences[0].num_preemptions == 0
    rig.expect(*sequences)
    assert engine.scheduler.num_free_blocks == 8


def test_an_end_token_ends_the_request_and_is_part_of_the_output(rig):
    prompt = rig.prompt(30)
    stop = rig.alone(prompt, 10)[4]
    engine = rig.engine()
    sequence = engine.add(prompt, max_new_tokens=10, stop_token_ids=[stop])
    *_, last = engine.run()
    assert sequence.output == rig.alone(prompt, 10, stop=stop)
    assert last.finish_reason == sequence.finish_reason == "stop"


def test_an_aborted_request_returns_its_blocks_and_disturbs_no_other(rig):
    engine = rig.engine(num_blocks=32)
    first = engine.add(rig.prompt(40), max_new_tokens=50)
    second = engine.add(rig.prompt(20), max_new_tokens=8)
    engine.step()
    assert engine.abort(first.request_id).finish_reason == "abort"
    assert engine.abort(first.request_id) is None
    list(engine.run())
    rig.expect(second)
    assert engine.scheduler.num_free_blocks == 32


def test_what_cannot_be_served_is_refused_with_its_numbers(rig):
    engine = rig.engine(num_blocks=4, block_size=16)
    engine.add(rig.prompt(5), max_new_tokens=1, request_id="a")
    for length, count, why in (
        (510, 10, r"510 tokens and 10 new ones do not fit the model's context of 512"),
        (60, 10, r"can grow to 5 blocks of 16 tokens, and the whole cache has 4"),
        (0, 10, "at least one prompt token"),
        (5, 1, "a request 'a' exists already"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.add(rig.prompt(length), max_new_tokens=count, request_id="a")
