"""The demo's three programs, the whole demo and its two halves: the commands for each worker, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplug import Config
from kvplug_transformers.demo.display import Display
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
    DECODE,
    PREFILL,
    REFERENCE,
    DemoError,
    Session,
    WorkerLostError,
)
from kvplug_transformers.demo.settings import DemoSettings, Report


def _session(
    config: Config, settings: DemoSettings, display: Display, programs: Mapping[str, Sequence[str]] | None
) -> Session:
    # The workers' own deadlines come first, since their errors have more details.
    patience_s = settings.patience_s + max(config.connect_timeout_s, config.timeout_s)
    return Session(display, programs, patience_s=patience_s)


def run(
    settings: DemoSettings, display: Display, programs: Mapping[str, Sequence[str]] | None = None
) -> Report:
    """The whole demo: prefill, transfer, decode, and the two comparisons.

    Args:
        programs: command lines instead of the usual ones, by worker.

    Raises:
        DemoError, KvplugError: the demo failed; the message says why.
    """
    config = Config.load(settings.config, overrides=settings.overrides)
    between_workers = check(config, settings, display)
    notes: list[str] = []
    with _session(config, settings, display, programs) as session:
        folder = model_folder(settings, session, display)
        start_worker(session, PREFILL, folder, config, settings)
        start_worker(session, DECODE, folder, config, settings)
        start_reference(session, folder, config.device)
        display.loading(PREFILL, DECODE, REFERENCE)
        loaded, _ = session.wait_for((PREFILL, "loaded"), (DECODE, "loaded"))
        ids, stop = encode(session, PREFILL, settings, loaded["context"])
        num_tokens = len(ids) + settings.max_new_tokens
        if (short := too_short(ids, settings)) is not None:
            notes.append(short)
            display.note(short)

        session.send(
            PREFILL,
            "open",
            num_tokens=num_tokens,
            listen=listen_address(config),
            connect=None,
            corrupt=settings.corrupt,
        )
        (opened,) = session.wait_for((PREFILL, "opened"))
        session.send(
            DECODE,
            "open",
            num_tokens=num_tokens,
            listen=None,
            connect=opened["contact"] or None,
            corrupt=False,
        )
        (ready,) = session.wait_for((DECODE, "ready"), while_alive=[PREFILL])
        # Do not measure while a process still loads.
        session.wait_for((REFERENCE, "loaded"))
        found, params = 0, None
        try:
            session.send(PREFILL, "prefill", ids=ids)
            (prefilled,) = session.wait_for((PREFILL, "prefilled"))
            found, params = prefilled["found"], prefilled["params"]
        except WorkerLostError as e:
            if settings.policy == "fail":
                raise DemoError(f"{e}, and the policy is to fail") from e
            notes.append(f"{e}: KV that has not arrived is recomputed")
            display.note(notes[-1])
        report = decode_and_compare(
            session,
            display,
            settings,
            ids,
            stop,
            notes=notes,
            ready=ready | between_workers,
            found=found,
            params=params,
        )
    return report


def decode_and_compare(
    session: Session,
    display: Display,
    settings: DemoSettings,
    ids: list[int],
    stop: list[int],
    *,
    notes: list[str],
    ready: Mapping[str, Any],
    patience_s: float = 0.0,
    found: int = 0,
    params: Mapping[str, Any] | None = None,
) -> Report:
    """Decode, then compute the same prompt without a transfer, then let the reference process generate.

    ``ready``: the decode worker's report, and the result of ``check``.
    ``params``: prefill's result for decode. It is valid once: to repeat, prefill computes the prompt again.
    """
    session.send(
        DECODE,
        "decode",
        ids=ids,
        max_new_tokens=settings.max_new_tokens,
        stop=stop,
        patience_s=patience_s,
        params=params,
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
    loaded = decoded["tokens_loaded"]
    nbytes = loaded * decoded["kv_bytes_per_token"]
    session.send(DECODE, "recompute", ids=ids, num_loaded=loaded, kv_bytes=nbytes)
    (recomputed,) = session.wait_for((DECODE, "recomputed"))
    pairs = []
    for _ in range(settings.repeat if loaded else 0):
        every: list[Mapping[str, Any] | None] = [None] * settings.at_once
        for number in range(settings.at_once if params is not None else 0):
            session.send(PREFILL, "prefill", ids=ids)
            (prefilled,) = session.wait_for((PREFILL, "prefilled"))
            every[number] = prefilled["params"]
        session.send(DECODE, "repeat", ids=ids, num_loaded=loaded, params=every)
        (repeated,) = session.wait_for((DECODE, "repeated"))
        if repeated["pair"] is not None:
            pairs.append(tuple(repeated["pair"]))
    display.generating(REFERENCE)
    session.send(REFERENCE, "generate", ids=ids, max_new_tokens=settings.max_new_tokens, stop=stop)
    (generated,) = session.wait_for((REFERENCE, "generated"))
    if generated["imported"]:
        raise DemoError(f"the reference process has imported {', '.join(generated['imported'])}")

    if decoded["ids"] != generated["ids"]:
        notes.append(f"decoded tokens {decoded['ids']}; model.generate gives {generated['ids']}")
        display.note(notes[-1])
    _note_if_lost(session, notes)  # the decode worker may notice its death long before this process does
    load = decoded["stats"]["ops"].get("load")
    # Every worker has loaded its part, and its time is in the sum.
    seconds = load["seconds"] / settings.tensor_parallel[1] if load and loaded else None
    ttft_s, floor_s = decoded["ttft_s"], recomputed["floor_s"]
    config = Config.load(settings.config, overrides=settings.overrides)
    return Report(
        prompt_tokens=len(ids),
        tokens_found=found,
        tokens_loaded=loaded,
        kv_bytes=nbytes,
        transfer_s=seconds,
        gb_per_s=nbytes / seconds / 1e9 if seconds else None,
        ttft_s=ttft_s,
        ttft_recompute_s=recomputed["ttft_s"],
        ttft_floor_s=floor_s and min(floor_s, ttft_s),  # on a busy machine it may have been measured slower
        ttft_pairs=tuple(pairs),
        identical=decoded["ids"] == generated["ids"],
        text=decoded["text"],
        connector=config.connector,
        transport=ready["transport"],
        tensor_parallel=settings.tensor_parallel,
        queue=ready.get("queue", ""),
        communicator=ready.get("communicator", ""),
        store=decoded["store"],
        device=config.device,
        reasons=(*ready["reasons"], *notes),
    )


def _note_if_lost(session: Session, notes: list[str]) -> None:
    if PREFILL in session.lost and not any("prefill" in note for note in notes):
        notes.append(f"the prefill process {session.lost[PREFILL]}")


def run_prefill(
    settings: DemoSettings,
    display: Display,
    listen: str | None,
    programs: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """The first terminal: prefill, print the command for the second terminal, and keep the KV until
    Ctrl-C.
    """
    config = Config.load(settings.config, overrides=settings.overrides)
    check(config, settings, display)
    with _session(config, settings, display, programs) as session:
        folder = model_folder(settings, session, display)
        start_worker(session, PREFILL, folder, config, settings)
        display.loading(PREFILL)
        (loaded,) = session.wait_for((PREFILL, "loaded"))
        ids, _ = encode(session, PREFILL, settings, loaded["context"])
        if (short := too_short(ids, settings)) is not None:
            display.note(short)
        session.send(
            PREFILL, "open", num_tokens=len(ids) + 1, listen=listen, connect=None, corrupt=settings.corrupt
        )
        (opened,) = session.wait_for((PREFILL, "opened"))
        display.serving(opened["contact"], settings.tensor_parallel[0])
        session.send(PREFILL, "prefill", ids=ids)
        (prefilled,) = session.wait_for((PREFILL, "prefilled"))
        if prefilled["params"] is not None:
            raise DemoError(
                f"connector {config.connector!r} hands KV over by a reference, which the second terminal does"
                f" not get: use `kvplug demo --connector {config.connector}`"
            )
        display.note("the KV cache is ready; Ctrl-C ends this")
        session.wait_for_end(PREFILL)
        raise WorkerLostError(PREFILL, session.lost[PREFILL])


def run_decode(
    settings: DemoSettings,
    display: Display,
    connect: str | None,
    programs: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """The second terminal: load from the prefill worker at ``connect``, decode, compare."""
    config = Config.load(settings.config, overrides=settings.overrides)
    between_workers = check(config, settings, display)
    notes: list[str] = []
    with _session(config, settings, display, programs) as session:
        folder = model_folder(settings, session, display)
        start_worker(session, DECODE, folder, config, settings)
        start_reference(session, folder, config.device)
        display.loading(DECODE, REFERENCE)
        loaded, _ = session.wait_for((DECODE, "loaded"), (REFERENCE, "loaded"))
        ids, stop = encode(session, DECODE, settings, loaded["context"])
        if (short := too_short(ids, settings)) is not None:
            notes.append(short)
            display.note(short)
        session.send(
            DECODE,
            "open",
            num_tokens=len(ids) + settings.max_new_tokens,
            listen=None,
            connect=connect,
            corrupt=False,
        )
        display.note("connecting to the prefill worker")
        (ready,) = session.wait_for((DECODE, "ready"))
        return decode_and_compare(
            session,
            display,
            settings,
            ids,
            stop,
            notes=notes,
            ready=ready | between_workers,
            patience_s=0.0 if short else config.connect_timeout_s,
        )
