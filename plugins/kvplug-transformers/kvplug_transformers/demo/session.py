"""Conducts the demo's processes: who is told what, and when."""

from __future__ import annotations

import os
import queue
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplug import Config, Kind, Registry
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.orders import Orders, Report
from kvplug_transformers.demo.processes import REFERENCE, WORKER, Child, Event, end_all, how_it_ended

PREFILL, DECODE, ALONE, CONVERT = "prefill", "decode", "reference", "convert"


class DemoError(Exception):
    """The demo cannot go on. The text is for the person in front of it."""


class WorkerLostError(DemoError):
    """A worker ended before it said what was waited for."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why
        super().__init__(f"the {name} process {why}")


class Session:
    """The workers of one demo. Leaving it ends them: politely after success, at once otherwise."""

    def __init__(self, display: Display, programs: Mapping[str, Sequence[str]] | None = None) -> None:
        self._display = display
        self._programs = {ALONE: REFERENCE, **(programs or {})}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self._said: dict[tuple[str, str], dict[str, Any]] = {}
        self.lost: dict[str, str] = {}
        """Workers that have ended, and how."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        end_all(self._children.values(), at_once=kind is not None)

    def start(self, name: str) -> Child:
        """Start one worker. It waits for its first command."""
        self._children[name] = Child(name, self._programs.get(name, WORKER), self._events)
        return self._children[name]

    def tell(self, name: str, op: str, **arguments: Any) -> None:
        self._children[name].send(op, **arguments)

    def wait_for(self, *wanted: tuple[str, str], while_alive: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Until each of these (worker, event) has come; what they said, in that order.

        Raises:
            WorkerLostError: one of these workers, or of ``while_alive``, ended first.
        """
        while not all(key in self._said for key in wanted):
            missing = {name for name, event in wanted if (name, event) not in self._said}
            for name in self.lost.keys() & {*missing, *while_alive}:
                raise WorkerLostError(name, self.lost[name])
            self._hear(*self._events.get())
        return [self._said.pop(key) for key in wanted]

    def wait_for_end(self, name: str) -> None:
        """Until this worker ends by itself."""
        while name not in self.lost:
            self._hear(*self._events.get())

    def _hear(self, name: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "exit":
            said = self._said.get((name, "error"))
            words = self._children[name].last_words
            why = how_it_ended(event["code"]) + (f":\n{words}" if words else "")
            self.lost[name] = f"gave up: {said['text']}" if said else why
        else:
            self._said[name, kind] = event
            self._display.hear(name, event)


def check_names(config: Config) -> None:
    """Refuse a name that no installed plugin offers, before any process is started.

    Raises:
        UnknownConnectorError, UnknownTransportError, AmbiguousNameError: with the names that are known.
    """
    registry = Registry.from_env()
    registry.get(Kind.CONNECTOR, config.connector)
    if config.transport != "auto":
        registry.get(Kind.PIPE, config.transport)


def model_folder(orders: Orders, session: Session, display: Display) -> Path:
    """The folder to load from; the packaged model is converted if it has not been yet.

    Raises:
        DemoError: there is no such folder.
        ModelMissingError: the package is not installed, and how to get it.
    """
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.cache import folder_for, is_complete

    if orders.model is not None:
        if not (orders.model / "config.json").is_file():
            raise DemoError(f"{orders.model} is no Hugging Face model folder: it has no config.json")
        return orders.model.resolve()
    source = find_gguf()
    folder = folder_for(source)
    if not is_complete(folder):
        display.note(f"unpacking {source.name} once, into {folder} (about 20 s)")
        session.start(CONVERT)
        session.tell(CONVERT, "convert", source=str(source))
        session.wait_for((CONVERT, "converted"))
        session.tell(CONVERT, "stop")
        session.wait_for_end(CONVERT)
    return folder


def listen_address(config: Config) -> str | None:
    """Where the prefill worker listens when nobody cares: a name nobody else has. ``None``: as configured."""
    if any(config.source_of(key) != "default" for key in ("host", "port", "port_offset")):
        return None
    abstract = f"unix:@kvplug-demo-{os.getpid()}-{secrets.token_hex(4)}"
    return abstract if sys.platform == "linux" else "127.0.0.1:0"


def start_worker(session: Session, name: str, folder: Path, orders: Orders) -> None:
    session.start(name)
    role = "producer" if name == PREFILL else "consumer"
    session.tell(name, "start", role=role, model=str(folder), threads=num_cpus(), orders=orders.to_plain())


def start_reference(session: Session, folder: Path) -> None:
    session.start(ALONE)
    session.tell(ALONE, "start", model=str(folder), threads=num_cpus())


def num_cpus() -> int:
    """Processors this process may use. The workers compute one after another, so each may have all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(session: Session, name: str, orders: Orders, context: int) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and those that end the text.

    Raises:
        DemoError: the prompt does not fit the model's context.
    """
    session.tell(name, "encode", prompt=orders.prompt)
    (said,) = session.wait_for((name, "tokens"))
    ids: list[int] = said["ids"]
    if len(ids) + orders.max_new_tokens > context:
        raise DemoError(
            f"the prompt has {len(ids)} tokens, which with {orders.max_new_tokens} new ones is more than"
            f" the model's context of {context}: shorten the prompt, or lower --max-new-tokens"
        )
    return ids, said["stop"]


def run(orders: Orders, display: Display, programs: Mapping[str, Sequence[str]] | None = None) -> Report:
    """The whole demo: prefill, transfer, decode, and the two comparisons.

    Args:
        programs: command lines instead of the usual ones, by worker.

    Raises:
        DemoError, KvplugError: it could not be done, and why.
    """
    config = Config.load(orders.config, overrides=orders.overrides)
    check_names(config)
    notes: list[str] = []
    with Session(display, programs) as session:
        folder = model_folder(orders, session, display)
        start_worker(session, PREFILL, folder, orders)
        start_worker(session, DECODE, folder, orders)
        start_reference(session, folder)
        display.loading(PREFILL, DECODE, ALONE)
        loaded, _ = session.wait_for((PREFILL, "loaded"), (DECODE, "loaded"))
        ids, stop = encode(session, PREFILL, orders, loaded["context"])
        num_tokens = len(ids) + orders.max_new_tokens
        if (short := too_short(ids, orders)) is not None:
            notes.append(short)
            display.note(short)

        session.tell(
            PREFILL,
            "open",
            num_tokens=num_tokens,
            listen=listen_address(config),
            connect=None,
            corrupt=orders.corrupt,
        )
        (opened,) = session.wait_for((PREFILL, "opened"))
        session.tell(
            DECODE,
            "open",
            num_tokens=num_tokens,
            listen=None,
            connect=opened["contact"] or None,
            corrupt=False,
        )
        (ready,) = session.wait_for((DECODE, "ready"), while_alive=[PREFILL])
        # Nobody measures while somebody else is still loading.
        session.wait_for((ALONE, "loaded"))
        try:
            session.tell(PREFILL, "prefill", ids=ids)
            session.wait_for((PREFILL, "prefilled"))
        except WorkerLostError as e:
            if config.failure_policy == "fail":
                raise DemoError(f"{e}, and the policy is to fail") from e
            notes.append(f"{e}: what has not arrived is recomputed")
            display.note(notes[-1])
        report = decode_and_compare(session, display, orders, ids, stop, notes=notes, ready=ready)
    return report


def too_short(ids: list[int], orders: Orders) -> str | None:
    if len(ids) > orders.block_size:
        return None
    return (
        f"the prompt has {len(ids)} tokens and a block {orders.block_size}: only whole blocks before the last"
        " token move, so nothing could be transferred"
    )


def decode_and_compare(
    session: Session,
    display: Display,
    orders: Orders,
    ids: list[int],
    stop: list[int],
    *,
    notes: list[str],
    ready: Mapping[str, Any],
    patience_s: float = 0.0,
) -> Report:
    """Decode, then compute the same prompt without a transfer, then ask the model running alone."""
    session.tell(
        DECODE, "decode", ids=ids, max_new_tokens=orders.max_new_tokens, stop=stop, patience_s=patience_s
    )
    (decoded,) = session.wait_for((DECODE, "decoded"))
    display.end_of_text()
    if PREFILL in session.lost and not any("prefill" in note for note in notes):
        notes.append(f"the prefill process {session.lost[PREFILL]}")
    failures = decoded["stats"]["failures"].get("load", {})
    why = ", ".join(f"{reason} ({count})" for reason, count in sorted(failures.items()))
    if decoded["error"]:
        notes.append(decoded["error"] + (f": {why}" if why else ""))
        if decoded["finish_reason"] == "error":
            display.note(notes[-1])
    session.tell(DECODE, "recompute", ids=ids)
    (recomputed,) = session.wait_for((DECODE, "recomputed"))
    display.generating(ALONE)
    session.tell(ALONE, "generate", ids=ids, max_new_tokens=orders.max_new_tokens, stop=stop)
    (generated,) = session.wait_for((ALONE, "generated"))
    if generated["imported"]:
        raise DemoError(f"the reference process has imported {', '.join(generated['imported'])}")

    loaded = decoded["tokens_loaded"]
    nbytes = loaded * decoded["kv_bytes_per_token"]
    load = decoded["stats"]["ops"].get("load")
    seconds = load["seconds"] if load and loaded else None
    config = Config.load(orders.config, overrides=orders.overrides)
    return Report(
        prompt_tokens=len(ids),
        tokens_loaded=loaded,
        kv_bytes=nbytes,
        transfer_s=seconds,
        gb_per_s=nbytes / seconds / 1e9 if seconds else None,
        ttft_s=decoded["ttft_s"],
        ttft_recompute_s=recomputed["ttft_s"],
        identical=decoded["ids"] == generated["ids"],
        text=decoded["text"],
        connector=config.connector,
        transport=ready["transport"],
        reasons=(*ready["reasons"], *notes),
    )


def run_prefill(
    orders: Orders,
    display: Display,
    listen: str | None,
    programs: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """One of two terminals: prefill, say how to reach it, and keep the KV until Ctrl-C."""
    check_names(Config.load(orders.config, overrides=orders.overrides))
    with Session(display, programs) as session:
        folder = model_folder(orders, session, display)
        start_worker(session, PREFILL, folder, orders)
        display.loading(PREFILL)
        (loaded,) = session.wait_for((PREFILL, "loaded"))
        ids, _ = encode(session, PREFILL, orders, loaded["context"])
        if (short := too_short(ids, orders)) is not None:
            display.note(short)
        session.tell(
            PREFILL, "open", num_tokens=len(ids) + 1, listen=listen, connect=None, corrupt=orders.corrupt
        )
        (opened,) = session.wait_for((PREFILL, "opened"))
        display.serving(opened["contact"])
        session.tell(PREFILL, "prefill", ids=ids)
        session.wait_for((PREFILL, "prefilled"))
        display.note("the KV cache is ready; Ctrl-C ends this")
        session.wait_for_end(PREFILL)
        raise WorkerLostError(PREFILL, session.lost[PREFILL])


def run_decode(
    orders: Orders,
    display: Display,
    connect: str | None,
    programs: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """The other terminal: load from the prefill worker at ``connect``, decode, compare."""
    config = Config.load(orders.config, overrides=orders.overrides)
    check_names(config)
    notes: list[str] = []
    with Session(display, programs) as session:
        folder = model_folder(orders, session, display)
        start_worker(session, DECODE, folder, orders)
        start_reference(session, folder)
        display.loading(DECODE, ALONE)
        loaded, _ = session.wait_for((DECODE, "loaded"), (ALONE, "loaded"))
        ids, stop = encode(session, DECODE, orders, loaded["context"])
        if (short := too_short(ids, orders)) is not None:
            notes.append(short)
            display.note(short)
        session.tell(
            DECODE,
            "open",
            num_tokens=len(ids) + orders.max_new_tokens,
            listen=None,
            connect=connect,
            corrupt=False,
        )
        display.note("connecting to the prefill worker")
        (ready,) = session.wait_for((DECODE, "ready"))
        return decode_and_compare(
            session,
            display,
            orders,
            ids,
            stop,
            notes=notes,
            ready=ready,
            patience_s=0.0 if short else config.connect_timeout_s,
        )
