"""How the engine calls a connector, and what it does with the answers, full caches and early ends."""

from __future__ import annotations

import random
import re

import pytest

from kvplug import TimeoutError
from kvplug.engine import BlocksStored, RequestEnd

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


@both_ways
@pytest.mark.parametrize("bad", [0, 20, 63])
def test_after_a_failed_load_the_rest_is_recomputed(rig, bad, in_background):
    prompt = rig.prompt(70)
    rig.prefill(prompt, rig.prompt(30))
    rig.table.bad_tokens = {bad}
    engine = rig.engine(in_background=in_background)
    (sequence,) = rig.run(engine, [prompt], 8)
    rig.expect(sequence)
    assert (sequence.num_failed_loads, sequence.generation) == (1, 1)
    assert sequence.num_loaded_tokens == bad // 16 * 16
    assert f"the KV of tokens {bad // 16 * 16} to 64 could not be loaded" in sequence.load_error
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks


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


def test_an_answer_of_not_yet_is_asked_again_and_lets_others_pass(rig):
    late, other = rig.prompt(50), rig.prompt(20)
    rig.prefill(late)
    engine = rig.engine(in_background=False)
    rig.table.not_yet = 1
    first, second = engine.add(late, max_new_tokens=4), engine.add(other, max_new_tokens=4)
    (token,) = engine.step()
    assert token.request_id == second.request_id
    list(engine.run())
    rig.expect(first)
    assert first.num_loaded_tokens == 48


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
    with pytest.raises(ValueError, match="there is a request 'a' already"):
        engine.add(prompt, max_new_tokens=1, request_id="a")
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks - 3
    assert engine.scheduler.has_pending_connector_work
    engine.settle(timeout=5)
    assert engine.scheduler.num_free_blocks == engine.options.num_blocks
    assert not engine.scheduler.has_pending_connector_work, "it need not be named as sent as well"


def test_an_id_used_again_is_not_computed_before_the_worker_side_knows_of_the_first_ones_end(rig):
    engine = rig.engine(in_background=False)
    engine.add(rig.prompt(40), max_new_tokens=1, request_id="a")
    engine.step()
    again = engine.add(rig.prompt(20), max_new_tokens=3, request_id="a")
    step = engine.scheduler.schedule()
    assert step.output.finished_request_ids == {"a"}
    assert step.output.scheduled == ()
    engine.scheduler.update(step, *engine.worker.execute(step))
    rig.table.scheduler.ends.clear()
    list(engine.run())
    rig.expect(again)


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


def test_a_request_that_runs_takes_blocks_from_one_that_has_only_loaded(rig):
    late = rig.prompt(33)
    rig.prefill(late)
    engine = rig.engine(in_background=True, num_blocks=4)
    first = engine.add(rig.prompt(16), max_new_tokens=40)
    second = engine.add(late, max_new_tokens=4)
    list(engine.run())
    rig.expect(first, second)
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0


# -- the calls ---------------------------------------------------------------------------------------

STEP = (
    r"build_connector_meta (handle_preemptions )?bind_connector_metadata start_load_kv "
    r"((wait_for_layer_load save_kv_layer ){3})?wait_for_save get_finished get_block_ids_with_load_errors "
    r"get_stats worker\.take_events build_worker_metadata clear_connector_metadata update_connector_output "
    r"(request_finished )*take_events "
)
ADMIT = r"(get_num_new_matched_tokens |(get_num_new_matched_tokens )?update_state_after_alloc )*"
START = r"register_kv_caches get_handshake_metadata set_xfer_handshake_metadata get_finished_count "


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


def test_a_connector_with_pending_work_gets_steps_until_it_has_none_but_not_for_ever(rig):
    engine = rig.engine(in_background=False)
    asked = []

    def has_pending_push_work():
        asked.append(rig.table.calls.count("build_connector_meta"))
        return len(asked) < 4

    rig.table.scheduler.has_pending_push_work = has_pending_push_work
    rig.run(engine, [rig.prompt(5)], 1)
    assert asked == []  # while a request is left there is no need to ask
    engine.settle(timeout=5)
    assert asked == [2, 3, 4, 5]  # steps so far, the first two for the request and its end
    rig.table.scheduler.has_pending_push_work = lambda: True
    with pytest.raises(TimeoutError, match="wants more steps"):
        engine.settle(timeout=0.05)


@pytest.mark.parametrize("metadata", [None, 0, {"a": (1, b"b")}])
def test_metadata_and_events_of_the_worker_side_arrive_as_they_are(rig, metadata):
    engine, received = rig.engine(in_background=False), []
    event = BlocksStored(block_hashes=(b"1",), token_ids=(1,), block_size=1)
    rig.table.worker.build_worker_metadata = lambda: metadata
    rig.table.scheduler.update_connector_output = lambda output: received.append(output.worker_metadata)
    rig.table.scheduler.take_events = rig.table.worker.take_events = lambda: [event]
    rig.run(engine, [rig.prompt(20)], 2)
    assert received == [() if metadata is None else (metadata,)] * 2
    assert engine.take_events() == [event] * 4
    assert engine.take_events() == []


def test_a_connector_that_prefers_one_tensor_for_all_layers_gets_it_and_nothing_else(rig):
    given = []

    def make(*args):
        class OneTensor(kind):
            prefer_cross_layer_blocks = True
            register_kv_caches = None  # exactly one of the two is called

            def register_cross_layers_kv_cache(self, kv_cache, layout):
                layout.check(kv_cache)
                given.append((kv_cache, layout))

        return OneTensor(*args)

    rig.engine(in_background=False)
    kind = type(rig.table.worker)
    engine = rig.engine(in_background=False, worker=make)
    ((tensor, layout),) = given
    assert layout.axes == "LKBTHD"
    assert tensor.data_ptr() == engine.worker.pages.tensor.data_ptr()


def test_both_sides_of_a_connector_are_given_and_shut_down(rig):
    engine = rig.engine(in_background=False)
    with pytest.raises(ValueError, match="both sides of a connector, or neither"):
        type(engine)(rig.model, scheduler_connector=rig.table.scheduler)
    engine.shutdown()
    assert (rig.table.scheduler.closed, rig.table.worker.closed) == (1, 1)


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
        assert not step.output.preempted_request_ids & writing.keys()
        scheduler.update(step, *engine.worker.execute(step))
        if not (waiting or scheduler.has_requests or scheduler.has_pending_connector_work):
            break
    else:
        raise AssertionError("it never ends")
    rig.expect(*(sequence for sequence in sequences if sequence.request_id not in aborted))
    assert scheduler.num_free_blocks == engine.options.num_blocks
