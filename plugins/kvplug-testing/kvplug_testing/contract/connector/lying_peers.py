"""A producer that has proved its identity and lies to a consumer (law ALL-10).

Both engines are in one process. The consumer reaches the producer through a relay, which changes what is said
over the connections at its address; and one message of a pipe may be changed. Nothing is changed at more than
one place: KV that is wrong afterwards must be in the report of its step, as for any other fault.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import attrs

from kvplug import Config
from kvplug_testing import peers, waits
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.contract.lied_to import LiedToOverPipes, report_lies
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.tampering.edits import Edit, edits_of
from kvplug_testing.tampering.falsehood import Falsehood
from kvplug_testing.tampering.pipe import TamperingPipe
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import Ended, ended

_STEP_S: Final = 1.0
"""``timeout_s`` of the engines that are lied to."""
_PROMPTS: Final = (tuple(range(100)), (*range(50), *range(200, 250)))


class LyingPeers(ConnectorSuite, LiedToOverPipes):
    """What a producer may say to a consumer."""

    lies = 20
    _run_ends = f"{__name__}:run_both_ends"

    @property
    def lied_to_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.other_processes or super().lied_to_processes


def run_both_ends(parent: peers.Parent, suite_ref: dict[str, Any], count: int, seed: int) -> str:
    """In a child process: a producer, and consumers that reach it."""
    suite: Any = suite_from_ref(suite_ref)
    with ExitStack() as stack, Relay() as relay:
        suite.use_stack(stack)
        suite.warm_up()
        return report_lies(parent, _Conversations(suite, relay), count, seed)


@attrs.frozen
class _Lie:
    edit: Edit | None = None
    pipe: int = -1
    """The number of the consumer's pipe, in the order in which they were made."""
    falsehood: Falsehood | None = None

    def __str__(self) -> str:
        return str(self.edit) if self.edit is not None else f"pipe {self.pipe}, {self.falsehood}"


class _Conversations:
    """A consumer each, which loads what the one producer holds."""

    def __init__(self, suite: Any, relay: Relay) -> None:
        self._suite = suite
        self._relay = relay
        self._params: list[dict[str, Any]] = []
        self._received: list[int] = []
        """Messages that have come over each pipe of the consumer's."""

    def truth(self) -> list[Ended]:
        prefill = self._suite.engine("producer", seed=1)
        for number, prompt in enumerate(_PROMPTS):
            self._params.append(self._suite.stored(prefill, prompt, name=f"stored {number}"))
        calls, _ = self._converse(waits.patience_s, None)
        return calls

    def lies(self, rng: random.Random) -> Iterator[_Lie]:
        said = edits_of(self._relay.recording, rng, forward=False)
        places = [(pipe, at) for pipe, number in enumerate(self._received) for at in range(number)]
        while True:
            edit = next(said, None)
            if edit is not None:
                yield _Lie(edit=edit)
            if places:
                pipe, at = rng.choice(places)
                yield _Lie(pipe=pipe, falsehood=Falsehood(at, rng.getrandbits(32)))
            elif edit is None:
                return

    def lie(self, lie: _Lie) -> tuple[str, list[Ended]]:
        calls, said = self._converse(_STEP_S, lie)
        return said or str(lie), calls

    def _converse(self, within: float, lie: _Lie | None) -> tuple[list[Ended], str]:
        self._relay.begin(lie.edit if lie is not None else None)
        pipes: list[TamperingPipe] = []

        def wrap(pipe: Any) -> TamperingPipe:
            is_it = lie is not None and lie.pipe == len(pipes)
            pipes.append(TamperingPipe(pipe, lie.falsehood if is_it and lie is not None else None))
            return pipes[-1]

        calls: list[Ended] = []

        def call(name: str, run: Callable[[], Any], within: float = within) -> Any:
            calls.append(ended(name, within, run))
            value, calls[-1] = calls[-1].value, attrs.evolve(calls[-1], value=None)
            return value

        make = functools.partial(
            FakeEngine,
            self._config(within),
            make=self._suite.make_side,
            wrap_pipe=wrap,
            seed=2,
        )
        decode = call("making a consumer", make, 4 * within)
        if decode is not None:
            for side in (decode.scheduler, decode.worker):
                call("wait_until_ready", functools.partial(side.wait_until_ready, within))
            for number, prompt in enumerate(_PROMPTS):
                request = request_of(f"loaded {number}", prompt, params=self._params[number])
                call("a request", functools.partial(_use, decode, request, within), 4 * within)
                calls[-1] = _judged(calls[-1])
            for side in (decode.scheduler, decode.worker):
                call("shutdown", side.shutdown, 4 * within)
        if lie is None:
            self._received = [pipe.num_received for pipe in pipes]
        return calls, "; ".join(
            f"pipe {number}, {pipe.said}" for number, pipe in enumerate(pipes) if pipe.said
        )

    def _config(self, timeout_s: float) -> Config:
        """Of a consumer that finds the relay where it looks for the producer."""
        self._relay.leave()
        theirs = self._suite.config_of("producer")
        given = {"timeout_s": timeout_s, "connect_timeout_s": timeout_s}
        ours: Config = self._suite.config_of("consumer", host=f"{theirs.host}-relayed", **given)
        self._relay.stand_at(ours.control_address(), theirs.control_address())
        return ours


class _WrongError(Exception):
    """Not an error of the connector's: what a request has got is not what the laws promise."""


def _judged(call: Ended) -> Ended:
    if call.error == _WrongError.__name__:
        return attrs.evolve(call, error="", is_ours=True, wrong=call.text)
    return call


def _use(decode: FakeEngine, request: Any, within: float) -> None:
    """What an engine does with a request: load what is promised, and compute the rest.

    Raises:
        _WrongError: wrong KV was not reported.
    """
    decode.scheduler.on_new_request(request)
    limit = time.monotonic() + within
    found, is_async = decode.scheduler.get_num_new_matched_tokens(request, 0)
    while found is None and time.monotonic() < limit:
        time.sleep(0.005)
        found, is_async = decode.scheduler.get_num_new_matched_tokens(request, 0)
    total = len(request.token_ids)
    if found is not None and not 0 <= found <= total:
        raise _WrongError(f"{found} of {total} tokens were promised")
    blocks = decode.allocate(total)
    found = found or 0
    decode.scheduler.update_state_after_alloc(request, (blocks,), found)
    report = decode.step([] if is_async else [(request, blocks, found, total - found)])
    invalid = set(report.invalid_block_ids)
    limit = time.monotonic() + 2 * within
    while is_async and request.request_id not in report.finished_recving and time.monotonic() < limit:
        time.sleep(0.005)
        report = decode.step([])
        invalid |= report.invalid_block_ids
    if is_async and request.request_id not in report.finished_recving:
        raise _WrongError("a request that loads in the background is never named as received")
    wrong = decode.cache.wrong_blocks(request.token_ids, blocks, 0, found)
    if unsaid := sorted(wrong - invalid):
        raise _WrongError(f"blocks {unsaid} have wrong KV, which no report says")
    if invalid - set(blocks):
        raise _WrongError("blocks of others were reported")
    decode.step([(request, blocks, 0, total)])
    if not decode.is_right(request.token_ids, blocks, total):
        raise _WrongError("what was computed again was overwritten")
    decode.finish(request, blocks)
