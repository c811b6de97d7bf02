"""The demo's three ways to run, whole or as one of two terminals: who is told what, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplug import Config
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.orders import Orders, Report
from kvplug_transformers.demo.preparation import (
    check,
    encode,
    listen_address,
    model_folder,
    start_reference,
    start_worker,
    too_short,
)
from kvplug_transformers.demo.session import (
    ALONE,
    DECODE,
    PREFILL,
    DemoError,
    Session,
    WorkerLostError,
)


def _session(
    config: Config, orders: Orders, display: Display, programs: Mapping[str, Sequence[str]] | None
) -> Session:
    # The workers' own deadlines come first: what they say when one has passed says more.
    patience_s = orders.patience_s + max(config.connect_timeout_s, config.timeout_s)
    return Session(display, programs, patience_s=patience_s)


def run(orders: Orders, display: Display, programs: Mapping[str, Sequence[str]] | None = None) -> Report:
    """The whole demo: prefill, transfer, decode, and the two comparisons.

    Args:
        programs: command lines instead of the usual ones, by worker.

    Raises:
        DemoError, KvplugError: it could not be done, and why.
    """
    config = Config.load(orders.config, overrides=orders.overrides)
    check(config, display)
    notes: list[str] = []
    with _session(config, orders, display, programs) as session:
        folder = model_folder(orders, session, display)
        start_worker(session, PREFILL, folder, orders)
        start_worker(session, DECODE, folder, orders)
        start_reference(session, folder, config.device)
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
    _note_if_lost(session, notes)
    failures = decoded["stats"]["failures"].get("load", {})
    why = ", ".join(f"{reason} ({count})" for reason, count in sorted(failures.items()))
    if decoded["error"]:
        notes.append(decoded["error"] + (f": {why}" if why else ""))
        if decoded["finish_reason"] == "error":
            display.note(notes[-1])
    elif not decoded["tokens_loaded"] and not notes:
        notes.append(
            f"the {PREFILL} process had no KV of this prompt, so nothing was transferred: give both the same"
        )
        display.note(notes[-1])
    session.tell(DECODE, "recompute", ids=ids)
    (recomputed,) = session.wait_for((DECODE, "recomputed"))
    display.generating(ALONE)
    session.tell(ALONE, "generate", ids=ids, max_new_tokens=orders.max_new_tokens, stop=stop)
    (generated,) = session.wait_for((ALONE, "generated"))
    if generated["imported"]:
        raise DemoError(f"the reference process has imported {', '.join(generated['imported'])}")

    _note_if_lost(session, notes)  # its peer may have heard of its death long before its parent
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
        device=config.device,
        reasons=(*ready["reasons"], *notes),
    )


def _note_if_lost(session: Session, notes: list[str]) -> None:
    if PREFILL in session.lost and not any("prefill" in note for note in notes):
        notes.append(f"the prefill process {session.lost[PREFILL]}")


def run_prefill(
    orders: Orders,
    display: Display,
    listen: str | None,
    programs: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """One of two terminals: prefill, say how to reach it, and keep the KV until Ctrl-C."""
    config = Config.load(orders.config, overrides=orders.overrides)
    check(config, display)
    with _session(config, orders, display, programs) as session:
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
    check(config, display)
    notes: list[str] = []
    with _session(config, orders, display, programs) as session:
        folder = model_folder(orders, session, display)
        start_worker(session, DECODE, folder, orders)
        start_reference(session, folder, config.device)
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
