"""The main program of the prefill and of the decode worker: ``python -m kvplug_transformers.demo.worker``.

It runs one engine and one connector with its two sides. The first command sets its role. The commands are the
methods ``_do_<op>`` of :class:`DemoWorker`; each returns the answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence as ManyOf
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplug import Config, ConnectorInfo, Registry, UnsupportedError
from kvplug.engine import Request, RequestEnd
from kvplug_transformers.engine.rank import WrapPipe
from kvplug_transformers.processes import Event, Parent, command_of

if TYPE_CHECKING:
    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.engine.options import EngineOptions
    from kvplug_transformers.engine.sequence import Sequence, Token
    from kvplug_transformers.engine.workers import Workers

_CHUNK = 256
"""Tokens in one step of prefill: small enough for a progress bar that moves."""
_ASK_AGAIN_S = 0.2
_PARTS = ("queue", "match", "schedule", "prefill")
"""The spans into which the time to the first token is divided."""
_FLOOR_RUNS = 3
_UNLIMITED_S = 1e6
"""The parent limits the time."""


class DemoWorker:
    """Executes commands one after another, and reports the results."""

    def __init__(self, parent: Parent, wrap_pipe: WrapPipe | None = None) -> None:
        self._parent = parent
        self._wrap_pipe = wrap_pipe
        self._registry = Registry.from_env()
        self._num_loaded = 0
        """How many tokens of the prompt decode has loaded."""
        self._copy_s = 0.0
        """Seconds of one copy of the loaded KV in memory."""
        self._workers: Workers | None = None
        """The processes that compute, if the engine has several."""

    def serve(self, stack: ExitStack) -> None:
        """Execute commands until the parent sends "stop"."""
        self._stack = stack
        for command in self._parent.commands(self._check):
            op = command.pop("op")
            self._parent.report(op, is_answer=True, **getattr(self, f"_do_{op}")(**command))

    def _check(self) -> None:
        if self._workers is not None:
            self._workers.check()

    def _do_convert(self, source: str, target: str) -> Event:
        """Make the folder of the packaged model."""
        from kvplug_transformers.model.convert import convert

        try:
            convert(Path(source), Path(target))
        except OSError as e:
            raise OSError(f"cannot write {target}: {e}; set KVPLUG_CACHE to another folder") from e
        return {}

    def _do_start(
        self,
        config: dict[str, Any],
        model: str,
        threads: int,
        num_workers: int,
        corrupt: bool,
        **settings: Any,
    ) -> Event:
        """Load the model: here, or if there are several workers, its parts in processes of their own.

        ``settings``: some of :class:`DemoSettings`.
        """
        self._settings = settings
        self._config = Config.from_dict(config)
        began = time.perf_counter()
        import torch

        from kvplug_transformers.model.facts import describe
        from kvplug_transformers.model.load import load

        torch.set_num_threads(threads)
        device = self._config.device
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as e:
            why = str(e).partition("\n")[0]
            raise UnsupportedError(f"device {device!r} cannot be used on this machine: {why}") from e
        self._loaded = load(Path(model), weights=num_workers == 1)
        if num_workers > 1:
            from kvplug_transformers.engine.workers import RANK_COMMAND, Workers
            from kvplug_transformers.model.shards import check_split

            check_split(self._loaded.model, num_workers)
            self._workers = Workers(
                Path(model),
                self._config,
                num_workers,
                threads=max(1, threads // num_workers),
                command=command_of("kvplug_transformers.demo.corruption") if corrupt else RANK_COMMAND,
                timeout=_UNLIMITED_S,
            )
            self._stack.callback(self._workers.close)
            self._facts = self._workers.facts
        else:
            if corrupt:
                from kvplug_transformers.demo.corruption import CorruptingPipe

                self._wrap_pipe = CorruptingPipe
            try:
                self._loaded.model.to(device)
            except RuntimeError as e:
                why = str(e).partition("\n")[0]
                raise UnsupportedError(f"the model does not fit on device {device!r}: {why}") from e
            self._facts = describe(self._loaded.model)
        self._ids = self._loaded.encode(settings["prompt"])
        return {
            "seconds": time.perf_counter() - began,
            "context": self._facts.context,
            "ids": self._ids,
            "stop": self._loaded.stop_token_ids,
        }

    def _do_open(self, listen: str | None, connect: str | None) -> Event:
        """Build the engine and its connector.

        ``connect``: the contacts of the peer's workers, with spaces between them.
        """
        from kvplug_transformers.engine.engine import Engine

        options = self._engine_options(len(self._ids) + self._settings["max_new_tokens"])
        if self._config.device != "cpu":
            self._warm_up()
        self._engine = Engine.connected(
            self._workers or self._loaded.model,
            self._config,
            options,
            listen=listen,
            connect=None if connect is None else dict(enumerate(connect.split())),
            registry=self._registry,
            wrap_pipe=self._wrap_pipe,
        )
        self._stack.callback(self._engine.shutdown)
        return {"contact": " ".join(self._engine.worker.contacts)}

    def _do_ready(self) -> Event:
        """Wait until the connector's peers are connected."""
        return self._engine.wait_until_ready()

    def _engine_alone(self, options: EngineOptions) -> Engine:
        """An engine without a connector, over the same model."""
        from kvplug_transformers.engine.engine import Engine

        return Engine(self._workers.open(options) if self._workers else self._loaded.model, options)

    def _warm_up(self) -> None:
        """Compute as many arbitrary tokens, in an engine without a connector.

        A GPU loads each kernel at its first use. Without a warm-up, the first measurement, with the transfer,
        would include this, and the second one, without a transfer, would not.
        """
        engine = self._engine_alone(self._engine_options(len(self._ids) + 2))
        engine.add([0] * len(self._ids), max_new_tokens=2)
        for _ in engine.run():
            self._parent.report("warming")

    def _engine_options(self, num_tokens: int) -> EngineOptions:
        from kvplug_transformers.engine.blocks import blocks_for
        from kvplug_transformers.engine.options import EngineOptions

        insisted = ConnectorInfo(self._config, self._registry).required_layout
        return EngineOptions(
            block_size=self._settings["block_size"],
            num_blocks=blocks_for(num_tokens, self._settings["block_size"]) * self._settings["at_once"],
            max_requests=self._settings["at_once"],
            layout=self._settings["layout"] or insisted or "KBTHD",
            max_tokens_per_step=_CHUNK,
            load_failure_policy=self._settings["policy"],
        )

    def _do_prefill(self) -> Event:
        """Compute the prompt and leave its KV with the connector."""
        began = time.perf_counter()
        sequence = self._engine.add(self._ids, max_new_tokens=1)
        params = None
        for token in self._steps(self._engine, sequence, "prefill"):
            params = token.params
        self._engine.settle(timeout=self._config.timeout_s)
        found = sequence.num_loaded_tokens
        return {"seconds": time.perf_counter() - began, "found": found, "params": params}

    def _do_decode(self, patience_s: float, params: dict[str, Any] | None) -> Event:
        """Load the available KV, compute the rest, and generate; then recompute the first token.

        ``params``: the result of prefill. Returns a part of the report as ``"report"``.
        """
        engine = self._engine
        if patience_s:
            self._wait_for_kv(patience_s)
        began = time.perf_counter()
        sequence = engine.add(
            self._ids,
            max_new_tokens=self._settings["max_new_tokens"],
            stop_token_ids=self._loaded.stop_token_ids,
            params=params,
        )
        first = None
        shown = ""
        for token in self._steps(engine, sequence, "prefill"):
            if first is None and token.token_id is not None:
                first = time.perf_counter() - began
            text = self._loaded.decode(sequence.output)
            if not text.endswith("\ufffd"):  # half a character: the next token completes it
                self._parent.report("text", text=text[len(shown) :])
                shown = text
        engine.settle(timeout=self._config.timeout_s)
        import torch

        info, stats = self._facts.info, engine.stats.snapshot()
        per_layer = 2 * info.num_kv_heads * info.head_size * getattr(torch, info.dtype).itemsize
        loaded = self._num_loaded = sequence.num_loaded_tokens
        kv_bytes = loaded * info.num_layers * per_layer
        seconds = None
        if loaded and (load := stats["ops"].get("load")):
            # Every worker has loaded its part, and its time is in the sum.
            seconds = load["seconds"] / (self._workers.size if self._workers else 1)
        recompute_s, floor_s = self._recompute(kv_bytes)
        return {
            "ids": sequence.output,
            "finish_reason": sequence.finish_reason,
            "error": sequence.error or sequence.load_error,
            "failures": stats["failures"].get("load", {}),
            "report": {
                "prompt_tokens": len(self._ids),
                "tokens_loaded": loaded,
                "kv_bytes": kv_bytes,
                "transfer_s": seconds,
                "gb_per_s": kv_bytes / seconds / 1e9 if seconds else None,
                "ttft_s": first,
                "ttft_parts_s": {
                    span.name: span.duration_ns / 1e9
                    for span in engine.spans.of_request(sequence.request_id)
                    if span.name in _PARTS
                },
                "ttft_recompute_s": recompute_s,
                # On a busy machine it may be measured slower.
                "ttft_floor_s": floor_s and min(floor_s, first or floor_s),
                "text": self._loaded.decode(sequence.output),
                "store": engine.worker.last_route,
            },
        }

    def _recompute(self, kv_bytes: int) -> tuple[float, float | None]:
        """Compute the first token again, in an engine without a connector; then with the KV of the loaded
        tokens in its own blocks already: the fastest is the floor of a transfer's time. Returns the seconds.
        """
        # Room for this prompt alone: the second time it gets the same blocks, in the same order.
        self._alone = self._engine_alone(self._engine_options(len(self._ids)))
        (computed,), recompute_s = self._first_token(self._alone)
        if self._settings["at_once"] > 1:  # its pool hands out blocks in the order in which they are freed
            self._first_token(self._alone, params=[None] * self._settings["at_once"])
        if not self._num_loaded:
            return recompute_s, None
        self._copy_s = _copy_seconds(kv_bytes)
        again = [self._first_token(self._alone, self._num_loaded) for _ in range(_FLOOR_RUNS)]
        # Another number of tokens in one step rounds differently, and may choose another token.
        if any(sequence.output != computed.output for (sequence,), _ in again):
            return recompute_s, None
        return recompute_s, min(seconds for _, seconds in again) + self._copy_s

    def _do_repeat(self, params: list[dict[str, Any] | None]) -> Event:
        """After :meth:`_do_decode`: compute the first tokens of concurrent requests, one for each of
        ``params``, with a transfer and with the KV in place."""
        loaded, with_s = self._first_token(self._engine, params=params)
        in_place, seconds = self._first_token(self._alone, self._num_loaded, [None] * len(params))
        is_alike = all(
            ours.num_loaded_tokens == self._num_loaded and ours.output == theirs.output
            for ours, theirs in zip(loaded, in_place, strict=True)
        )
        return {"pair": (with_s, seconds + self._copy_s * len(params)) if is_alike else None}

    def _first_token(
        self,
        engine: Engine,
        num_in_place: int = 0,
        params: ManyOf[dict[str, Any] | None] = (None,),
    ) -> tuple[list[Sequence], float]:
        """Make a request for each of ``params``. Also returns the seconds until all have a first token."""
        began = time.perf_counter()
        sequences = [engine.add(self._ids, max_new_tokens=1, params=given) for given in params]
        for sequence in sequences if num_in_place else ():
            sequence.num_computed_tokens = num_in_place
        for sequence in sequences:
            for _ in self._steps(engine, sequence, "recompute"):
                pass
        return sequences, time.perf_counter() - began

    def _steps(self, engine: Engine, sequence: Sequence, phase: str) -> Iterator[Token]:
        """Step until the request has ended; yields its tokens, and reports progress of its prompt."""
        done, total = 0, len(sequence.prompt)
        while sequence.finish_reason is None:
            yield from engine.step()
            if not sequence.output and sequence.num_computed_tokens != done:
                done = sequence.num_computed_tokens
                self._parent.report("progress", phase=phase, done=done, total=total)

    def _wait_for_kv(self, patience_s: float) -> None:
        """Wait until the peer, which may still compute this prompt, has its KV; at most ``patience_s``.

        Asks the scheduler side, as an engine does for a request that it has not admitted yet.
        """
        scheduler = self._engine.scheduler_connector
        assert scheduler is not None
        end = time.monotonic() + patience_s
        for number in range(1 << 30):
            request = Request(
                request_id=f"is-it-there-{number}",
                token_ids=tuple(self._ids),
                num_prompt_tokens=len(self._ids),
            )
            scheduler.on_new_request(request)
            while (found := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
                if time.monotonic() > end:
                    break
                time.sleep(0.001)
            scheduler.request_finished(request, ((),), RequestEnd.ABORTED)
            if found or time.monotonic() > end:
                return
            self._parent.report("waiting")
            time.sleep(_ASK_AGAIN_S)


def _copy_seconds(nbytes: int) -> float:
    """Seconds of a copy of ``nbytes`` by one thread into existing memory: the median of five."""
    import torch

    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main(wrap_pipe: WrapPipe | None = None) -> None:
    """``wrap_pipe`` wraps every pipe; tests inject faults with it."""
    parent = Parent()
    parent.run(DemoWorker(parent, wrap_pipe).serve)


if __name__ == "__main__":
    main()
