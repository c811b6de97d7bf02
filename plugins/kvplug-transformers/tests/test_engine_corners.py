"""Where an engine and a connector get into each other's way: full caches, early ends, ids used twice."""

from __future__ import annotations

import random

import pytest

from kvplug.engine import BlocksStored, RequestEnd

pytestmark = pytest.mark.timeout(60)


def prefill(engine_on, model, *prompts):
    engine = engine_on(model, saves=True)
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=1)
    list(engine.run())


def test_loaded_requests_that_hold_all_blocks_do_not_wait_for_each_other(
    llama, alone, random_prompt, engine_on
):
    prompts = [random_prompt(33), random_prompt(33)]
    prefill(engine_on, llama, *prompts)
    # Two blocks each are loaded; to compute its last token each needs a third.
    engine = engine_on(llama, in_background=True, num_blocks=4)
    sequences = [engine.add(prompt, max_new_tokens=10) for prompt in prompts]
    list(engine.run())
    assert [sequence.output for sequence in sequences] == [alone(llama, prompt, 10) for prompt in prompts]
    (victim,) = (sequence for sequence in sequences if sequence.num_preemptions)
    assert engine.worker._connector.preempted == {victim.request_id}


def test_a_request_that_runs_takes_blocks_from_one_that_has_only_loaded(
    llama, alone, random_prompt, engine_on
):
    late, running = random_prompt(33), random_prompt(16)
    prefill(engine_on, llama, late)
    engine = engine_on(llama, in_background=True, num_blocks=4)
    first = engine.add(running, max_new_tokens=40)
    second = engine.add(late, max_new_tokens=4)
    list(engine.run())
    assert (first.output, second.output) == (alone(llama, running, 40), alone(llama, late, 4))
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0


def test_an_id_used_again_is_not_computed_before_the_worker_side_knows_of_the_first_ones_end(
    llama, alone, random_prompt, engine_on
):
    prompts = [random_prompt(40), random_prompt(20)]
    engine = engine_on(llama)
    engine.add(prompts[0], max_new_tokens=1, request_id="a")
    engine.step()
    again = engine.add(prompts[1], max_new_tokens=3, request_id="a")
    step = engine.scheduler.schedule()
    assert step.output.finished_request_ids == {"a"}
    assert step.output.scheduled == ()
    engine.scheduler.update(step, *engine.worker.execute(step))
    engine.scheduler._connector.ends.clear()
    list(engine.run())
    assert again.output == alone(llama, prompts[1], 3)


def test_an_id_whose_blocks_are_still_lent_is_refused(llama, random_prompt, engine_on, table):
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    engine = engine_on(llama, in_background=True)
    engine.add(prompt, max_new_tokens=1, request_id="a")
    engine.step()
    engine.abort("a")
    with pytest.raises(ValueError, match="there is a request 'a' already"):
        engine.add(prompt, max_new_tokens=1, request_id="a")


def test_blocks_that_the_connector_keeps_when_a_load_has_failed_are_not_freed_in_the_same_step(
    llama, random_prompt, engine_on, table
):
    prompt = random_prompt(50)
    prefill(engine_on, llama, prompt)
    engine = engine_on(llama, in_background=True, load_failure_policy="fail")
    scheduler, worker = engine.scheduler._connector, engine.worker._connector
    scheduler.request_finished = lambda *_: (True, None)
    table.bad_tokens = {20}
    sequence = engine.add(prompt, max_new_tokens=2)
    list(engine.run())
    assert sequence.finish_reason == "error"
    engine.step()
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks - 3
    worker.get_finished = lambda _: (frozenset({sequence.request_id}), frozenset())
    engine.step()
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_several_requests_whose_loads_fail_in_one_step_each_get_their_due(
    llama, alone, random_prompt, engine_on, table, policy, in_background
):
    prompts = [random_prompt(length) for length in (50, 40, 33)]
    prefill(engine_on, llama, *prompts)
    table.bad_tokens = {20}
    engine = engine_on(llama, in_background=in_background, load_failure_policy=policy)
    sequences = [engine.add(prompt, max_new_tokens=6) for prompt in prompts]
    list(engine.run())
    engine.settle(timeout=5)
    assert [sequence.num_failed_loads for sequence in sequences] == [1, 1, 1]
    ends = set(engine.scheduler._connector.ends.values())
    if policy == "fail":
        assert [sequence.finish_reason for sequence in sequences] == ["error"] * 3
        assert ends == {RequestEnd.FAILED}
    else:
        assert [sequence.output for sequence in sequences] == [alone(llama, one, 6) for one in prompts]
        assert ends == {RequestEnd.FINISHED}
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


def test_events_are_taken_in_each_step_and_kept_for_whoever_asks(llama, random_prompt, engine_on):
    engine = engine_on(llama)
    event = BlocksStored(block_hashes=(b"1",), token_ids=(1,), block_size=1)
    engine.scheduler._connector.take_events = lambda: [event]
    engine.worker._connector.take_events = lambda: [event]
    engine.add(random_prompt(5), max_new_tokens=2)
    list(engine.run())
    assert engine.take_events() == [event] * 4
    assert engine.take_events() == []


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_block_has_two_masters_and_the_tokens_are_right(
    llama, alone, random_prompt, engine_on, table, seed
):
    """Random requests, aborts, failures and too little memory; after each plan, who has which block."""
    chance = random.Random(seed)
    prompts = [random_prompt(chance.randint(1, 70)) for _ in range(8)]
    prefill(engine_on, llama, *chance.sample(prompts, 6))
    table.bad_tokens = set(chance.sample(range(70), chance.choice([0, 3])))
    table.steps_to_load = chance.randint(1, 4)
    engine = engine_on(
        llama,
        in_background=chance.random() < 0.7,
        num_blocks=chance.randint(6, 14),
        max_tokens_per_step=chance.choice([7, 64]),
        max_requests=chance.choice([2, 8]),
        load_failure_policy="recompute",
    )
    scheduler, worker = engine.scheduler, engine.worker
    writing = worker._connector.under_way
    waiting = [(prompt, chance.randint(1, 20)) for prompt in prompts]
    sequences = []
    aborted = set()
    for number in range(2000):
        if waiting and chance.random() < 0.3:
            prompt, count = waiting.pop()
            sequences.append(engine.add(prompt, max_new_tokens=count))
        if sequences and chance.random() < 0.05:
            victim = chance.choice(sequences)
            if engine.abort(victim.request_id) is not None:
                aborted.add(victim.request_id)
        table.not_yet = int(chance.random() < 0.1)
        lent = {block for _, load in writing.values() for block in load["blocks"]}
        step = scheduler.schedule()
        owned = [block for table in step.block_tables for block in table]
        assert len(set(owned)) == len(owned), f"step {number}: a block is in two requests"
        assert not lent.intersection(owned), f"step {number}: a block that a load writes into is used"
        assert not step.output.preempted_request_ids & writing.keys()
        scheduler.update(step, *worker.execute(step))
        if not (waiting or scheduler.has_requests or scheduler.has_pending_connector_work):
            break
    else:
        raise AssertionError("it never ends")
    for sequence in sequences:
        if sequence.request_id not in aborted:
            assert sequence.output == alone(llama, list(sequence.prompt), sequence.max_new_tokens)
    assert scheduler.num_free_blocks == engine.options.num_blocks
