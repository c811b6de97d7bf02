"""The demo's output on a terminal: progress, the generated text, the table of results."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from kvplug.transport import peer_text

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kvplug_transformers.demo.settings import Report

_PHASES = {"progress": "prefill", "decode_progress": "prefill", "recompute_progress": "recompute"}


class Display:
    """Progress goes to stderr: bars on a terminal, else a line for each completed phase.

    The text goes to stdout as it is generated. ``quiet`` omits it: with ``--json``, stdout holds only one
    object.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._quiet = quiet
        for stream in (sys.stdout, sys.stderr):
            # A character that the terminal's encoding lacks must not end the demo.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        self._stderr = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.fields[who]:>9}"),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]:>13}"),
            TimeElapsedColumn(),
            console=self._stderr,
            transient=True,
            disable=not self._stderr.is_terminal,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._is_in_text = False

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, name: str, event: dict[str, Any]) -> None:
        """Show an event of a worker; most events show nothing."""
        kind = event["event"]
        if kind in _PHASES:
            self._advance(name, _PHASES[kind], event["done"], event["total"])
        elif kind == "loaded":
            self._finish(name, "load model")
            took = f" in {event['seconds']:.1f} s" if "seconds" in event else ""
            self._line(f"{name}: model loaded{took}")
        elif kind == "prefilled":
            self._finish(name, "prefill")
            kept = f" ({event['found']} tokens came from a store)" if event.get("found") else ""
            self._line(f"{name}: prompt computed in {event['seconds']:.2f} s{kept}")
        elif kind == "recomputed":
            self._finish(name, "recompute")
        elif kind == "ready" and event["transport"]:
            self._line(f"{name}: connected, transport {event['transport']}")
        elif kind == "text" and not self._quiet:
            self._text(event["text"])

    def note(self, text: str) -> None:
        """Print one sentence on stderr."""
        self._stderr.print(peer_text(text, keep_lines=True), markup=False, soft_wrap=True)

    def loading(self, *names: str) -> None:
        """These workers are loading the model now."""
        for name in names:
            self._begin(name, "load model", None)

    def generating(self, name: str) -> None:
        """The reference process generates, without progress until it is done."""
        self._begin(name, "generate", None)

    def serving(self, contact: str, num_workers: int) -> None:
        """Print the command for the other terminal."""
        option = f" --tensor-parallel {num_workers}" if num_workers > 1 else ""
        print(f"kvplug demo decode --connect '{contact}'{option}", flush=True)  # noqa: T201

    def end_of_text(self) -> None:
        """The text is complete; show bars again for the comparisons."""
        for name, what in list(self._tasks):
            self._finish(name, what)
        if self._is_in_text:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._is_in_text = False
            self._progress.start()

    def _advance(self, name: str, what: str, done: int, total: int) -> None:
        key = (name, what)
        if key not in self._tasks:
            self._begin(name, what, total)
        self._progress.update(self._tasks[key], completed=done, count=f"{done}/{total}")
        if not self._stderr.is_terminal and not self._is_in_text:
            self._line(f"{name}: {what} {done}/{total} tokens")

    def _begin(self, name: str, what: str, total: int | None) -> None:
        self._tasks[name, what] = self._progress.add_task(what, total=total, who=name, count="")

    def _finish(self, name: str, what: str) -> None:
        task = self._tasks.pop((name, what), None)
        if task is not None:
            self._progress.remove_task(task)

    def _line(self, text: str) -> None:
        if not self._stderr.is_terminal:
            self.note(text)

    def _text(self, text: str) -> None:
        if not self._is_in_text:
            self._progress.stop()  # text and bars would mix on a terminal
            self._is_in_text = True
        sys.stdout.write(peer_text(text, keep_lines=True))
        sys.stdout.flush()

    def table(self, report: Report) -> None:
        """Print the results on stdout."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in rows(report):
            table.add_row(name, Text(peer_text(value, keep_lines=True)))
        console = Console(highlight=False)
        console.print()
        console.print(table)


def rows(report: Report) -> list[tuple[str, str]]:
    """The table's rows, as text."""

    def seconds(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"

    speed = "" if report.gb_per_s is None else f", {report.gb_per_s:.2f} GB/s"
    found = [
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        *([("tokens found by prefill", f"{report.tokens_found:,}")] if report.tokens_found else []),
        ("tokens loaded", f"{report.tokens_loaded:,}"),
        ("KV bytes", f"{report.kv_bytes:,}"),
        ("transfer", seconds(report.transfer_s) + speed),
        ("time to first token, with the transfer", seconds(report.ttft_s)),
        (
            "time to first token, at least",
            f"{seconds(report.ttft_floor_s)} (KV in place, and one copy)",
        ),
        ("time to first token, recomputed", f"{seconds(report.ttft_recompute_s)} (in the decode process)"),
        ("connector, transport", f"{report.connector}, {report.transport or '-'}"),
        *(
            [
                ("workers: prefill, decode", ", ".join(map(str, report.tensor_parallel))),
                ("queue, communicator", f"{report.queue}, {report.communicator}"),
            ]
            if report.queue
            else []
        ),
        *([("store", report.store)] if report.store else []),
        ("device", report.device),
    ]
    found += [("" if number else "why", reason) for number, reason in enumerate(report.reasons)]
    same = "yes: those of model.generate in a third process" if report.identical else "NO"
    return [*found, ("tokens identical", same)]
