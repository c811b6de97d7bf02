"""How the engine calls a connector, and what it does with the answers, full caches and early ends."""

from __future__ import annotations

import random
import re

import pytest

from kvplug.engine import RequestEnd

pytestmark = pytest.mark.timeout(60)
both_ways = pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])


def whole(prompt: list[int], block_size: int = 16) -> int:
    """How many tokens of the prompt are loaded at most."""
    return (len(prompt) - 1) // block_size * block_size


@both_ways
@pytest.mark.parametrize(
    ("rig", "theirs", "ours"),
    [
        ("llama", {}, {}),
        ("gpt2", {}, {}),
        ("llama", {"layout": "KBTHD"}, {"layout": "KBHTD"}),
        ("llama", {"block_size": 32}, {"block_size": 16}),
        ("llama", {"max_tokens_per_step": 7}, {"max_tokens_per_step": 5}),
    ],
    ids=["alike", "gpt2", "another-layout", "another-block-size", "in-chunks"],
    indirect=["rig"],
)
def test_tokens_decoded_after_a_load_are_those_of_the_model_alone(rig, theirs, ours, in_background):
    prompts = [*map(rig.prompt, (70, 41, 33, 8))]
    rig.prefill(*prompts, **theirs)
    engine = rig.engine(in_background=in_background, **ours)
    sequences = rig.run(engine, prompts, 8)
    rig.expect(*sequences)
    size = engine.options.block_size
    assert [one.num_loaded_tokens for one in sequences] == [whole(prompt, size) for prompt in prompts]


def test_loaded_kv_is_really_used_and_only_under_its_own_extra(rig):
    """The control: with another prompt's KV in its place the tokens differ."""
    prompt = rig.prompt(50)
    rig.prefill(prompt)
    for layers in rig.table.entries.values():
        for key, value in layers:
            key.neg_()
            value.neg_()
    engine = rig.engine(in_background=False)
    sequence = engine.add(prompt, max_new_tokens=8)
    other = engine.add(prompt, max_new_tokens=8, extra=b"an adapter")
    list(engine.run())
    assert (sequence.num_loaded_tokens, other.num_loaded_tokens) == (48, 0)
    assert sequence.output != other.output == rig.alone(prompt, 8)


# -- loads that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@both_ways
def test_requests_whose_loads_fail_in_one_step_are_recomputed_or_end_by_the_policy(
    rig, policy, in_background
):
    prompts = [*map(rig.prompt, (50, 40, 33))]
    rig.prefill(*prompts)
    rig.table.bad_tokens = {20}
    engine = rig.engine(in_background=in_background, load_failure_policy=policy)
    sequences = [engine.add(prompt, max_new_tokens=6) for prompt in prompts]
    untouched = engine.add(rig.prompt(15), max_new_tokens=6)
    tokens = [token for token in engine.run() if token.request_id != untouched.request_id]
    engine.settle(timeout=5)
    assert [sequence.num_failed_loads for sequence in sequences] == [1, 1, 1]
    ends = {one.request_id: RequestEnd.FINISHED for one in (*sequences, untouched)}
    if policy == "fail":
        assert [(token.token_id, token.finish_reason) for token in tokens] == [(None, "error")] * 3
        assert {token.error for token in tokens} == {
            f"the KV of tokens 16 to {end} could not be loaded, and the policy is to fail" for end in (48, 32)
        }
        assert [sequence.output for sequence in sequences] == [[]] * 3
        ends |= {one.request_id: RequestEnd.FAILED for one in sequences}
    else:
        rig.expect(*sequences)
    rig.expect(untouched)
    assert rig.table.scheduler.ends == ends
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


def test_blocks_that_the_connector_keeps_when_a_load_has_failed_are_not_freed_in_the_same_step(rig):
    prompt = rig.prompt(50)
    rig.prefill(prompt)
    engine = rig.engine(in_background=True, load_failure_policy="fail")
    rig.table.scheduler.request_finished = lambda *_: (True, None)
    rig.table.bad_tokens = {20}
    (sequence,) = rig.run(engine, [prompt], 2)
    assert sequence.finish_reason == "error"
    engine.step()
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks - 3
    rig.table.worker.get_finished = lambda _: (frozenset({sequence.request_id}), frozenset())
    engine.step()
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


# -- loads in the background, and early ends --------------------------------------------------------


def test_while_one_request_loads_in_the_background_others_compute(rig):
    late, other = rig.prompt(50), rig.prompt(20)
    rig.prefill(late)
    rig.table.calls.clear()
    rig.table.steps_to_load = 4
    engine = rig.engine(in_background=True)
    first, second = engine.add(late, max_new_tokens=4), engine.add(other, max_new_tokens=8)
    order = [token.request_id for token in engine.run()]
    assert order[:3] == [second.request_id] * 3
    rig.expect(first, second)
    assert rig.table.calls.count("update_state_after_alloc") == 3, "twice for the request that loads"
    assert rig.table.calls.count("get_num_new_matched_tokens") == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_has_ended(rig, keeps):
    prompt = rig.prompt(50)
    rig.prefill(prompt)
    engine = rig.engine(in_background=True)
    rig.table.scheduler.request_finished = lambda *_: (keeps, None)
    engine.add(prompt, max_new_tokens=4, request_id="a")
    engine.step()
    engine.abort("a")
    with pytest.raises(ValueError, match="a request 'a' exists already"):
        engine.add(prompt, max_new_tokens=1, request_id="a")
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks - 3
    assert engine.scheduler.has_pending_connector_work
    engine.settle(timeout=5)
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks
    assert not engine.scheduler.has_pending_connector_work, "it need not be named as sent as well"


# -- blocks run out ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_blocks", "in_background"),
    [((40, 40, 40), 10, False), ((33, 33), 4, True)],
    # Of the latter two blocks each are loaded; to compute its last token each needs a third.
    ids=["running requests", "loaded requests wait for each other"],
)
def test_preempted_requests_are_named_before_their_blocks_are_overwritten_and_load_again(
    rig, lengths, num_blocks, in_background
):
    prompts = [*map(rig.prompt, lengths)]
    rig.prefill(*prompts)
    engine = rig.engine(in_background=in_background, num_blocks=num_blocks)
    sequences = rig.run(engine, prompts, 20 if len(prompts) > 2 else 10)
    rig.expect(*sequences)
    preempted = {sequence.request_id for sequence in sequences if sequence.num_preemptions}
    assert preempted
    assert rig.table.worker.preempted == preempted


# -- the calls ---------------------------------------------------------------------------------------

STEP = (
    r"build_connector_meta (handle_preemptions )?bind_connector_metadata start_load_kv "
    r"((wait_for_layer_load save_kv_layer ){3})?wait_for_save get_finished get_block_ids_with_load_errors "
    r"get_stats worker\.take_events build_worker_metadata clear_connector_metadata update_connector_output "
    r"(request_finished )*take_events "
)
ADMIT = r"(get_num_new_matched_tokens |(get_num_new_matched_tokens )?update_state_after_alloc )*"
START = r"register_kv_caches get_handshake_metadata set_xfer_handshake_metadata "


@both_ways
def test_the_calls_come_in_the_documented_order(rig, in_background):
    prompts = [*map(rig.prompt, (50, 20, 33))]
    rig.prefill(*prompts)
    rig.table.calls.clear()
    engine = rig.engine(in_background=in_background, num_blocks=9, max_tokens_per_step=20)
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=20)
    while engine.scheduler.has_requests or engine.scheduler.has_pending_connector_work:
        engine.step()
    calls = " ".join(rig.table.calls) + " "
    assert re.fullmatch(rf"{START}(on_new_request ){{3}}({ADMIT}{STEP})+", calls), calls
    assert rig.table.calls.count("request_finished") == 3
    assert "handle_preemptions" in rig.table.calls


# -- everything at once ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 12))]
)
def test_whatever_happens_no_block_has_two_owners_and_the_tokens_are_right(rig, seed):
    """Random requests, aborts, failures and too little memory; the owners of blocks after each plan."""
    chance = random.Random(seed)
    prompts = [rig.prompt(chance.randint(1, 70)) for _ in range(8)]
    rig.prefill(*chance.sample(prompts, 6))
    rig.table.bad_tokens = set(chance.sample(range(70), chance.choice([0, 3])))
    rig.table.steps_to_load = chance.randint(1, 4)
    engine = rig.engine(
        in_background=chance.random() < 0.7,
        num_blocks=chance.randint(6, 14),
        max_tokens_per_step=chance.choice([7, 64]),
        max_requests=chance.choice([2, 8]),
        load_failure_policy="recompute",
    )
    scheduler, writing = engine.scheduler, rig.table.worker.under_way
    waiting = [(prompt, chance.randint(1, 20)) for prompt in prompts]
    sequences, aborted = [], set()
    for number in range(2000):
        if waiting and chance.random() < 0.3:
            prompt, count = waiting.pop()
            sequences.append(engine.add(prompt, max_new_tokens=count))
        if sequences and chance.random() < 0.05:
            victim = chance.choice(sequences)
            if engine.abort(victim.request_id) is not None:
                aborted.add(victim.request_id)
        rig.table.not_yet = int(chance.random() < 0.1)
        lent = {block for _, (_, _, blocks) in writing.values() for block in blocks}
        step = scheduler.schedule()
        owned = [block for blocks in step.block_tables for block in blocks]
        assert len(set(owned)) == len(owned), f"step {number}: a block is in two requests"
        assert not lent.intersection(owned), f"step {number}: a block that a load writes into is used"
        assert not step.preempted_request_ids & writing.keys()
        sampled, output, _ = engine.worker.execute(step)
        scheduler.update(step, sampled, output)
        if not (waiting or scheduler.has_requests or scheduler.has_pending_connector_work):
            break
    else:
        raise AssertionError("it never ends")
    rig.expect(*(sequence for sequence in sequences if sequence.request_id not in aborted))
    assert scheduler.num_free_blocks == engine.options.num_blocks
