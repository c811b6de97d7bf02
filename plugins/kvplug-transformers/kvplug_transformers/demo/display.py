"""The demo's output on a terminal: progress, the generated text, the table of results."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from kvplug.transport import peer_text

if TYPE_CHECKING:
    from kvplug_transformers.demo.settings import Report


class Display:
    """Progress goes to stderr: the current state on a terminal, else a line for each step.

    The text goes to stdout as it is generated. ``quiet`` omits it: with ``--json``, stdout holds only one
    object.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.console import Console

        self._quiet = quiet
        for stream in (sys.stdout, sys.stderr):
            # A character that the terminal's encoding lacks must not end the demo.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        self._stderr = Console(stderr=True, highlight=False)
        self._state = self._stderr.status("starting")
        self._is_in_text = False

    def __enter__(self) -> Display:
        self._state.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._state.stop()

    def show(self, name: str, event: dict[str, Any]) -> None:
        """Show an event of a process; most events show nothing."""
        if self._is_in_text and event["event"] != "text":
            print(flush=True)  # noqa: T201 - the text is complete
            self._is_in_text = False
            self._state.start()
        match event["event"]:
            case "text" if not self._quiet:
                self._text(event["text"])
            case "progress":
                self.step(f"{name}: {event['phase']} {event['done']}/{event['total']} tokens")
            case "start":
                self.step(
                    f"{name}: model loaded" + (f" in {event['seconds']:.1f} s" if "seconds" in event else "")
                )
            case "prefill":
                kept = f" ({event['found']} tokens came from a store)" if event["found"] else ""
                self.step(f"{name}: prompt computed in {event['seconds']:.2f} s{kept}")
            case "ready" if event["transport"]:
                self.step(f"{name}: connected, transport {event['transport']}")

    def step(self, text: str) -> None:
        """Show one step: on a terminal in place of the previous one."""
        from rich.text import Text

        if self._stderr.is_terminal:
            self._state.update(Text(peer_text(text)))
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """Print one sentence on stderr."""
        self._stderr.print(peer_text(text, keep_lines=True), markup=False, soft_wrap=True)

    def serving(self, contact: str, num_workers: int) -> None:
        """Print the command for the other terminal."""
        option = f" --tensor-parallel {num_workers}" if num_workers > 1 else ""
        print(f"kvplug demo decode --connect '{contact}'{option}", flush=True)  # noqa: T201

    def _text(self, text: str) -> None:
        if not self._is_in_text:
            self._state.stop()  # it would mix with the text on a terminal
            self._is_in_text = True
        print(peer_text(text, keep_lines=True), end="", flush=True)  # noqa: T201

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
    """The table's rows, as text; those without a value are left out."""

    def seconds(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"

    speed = "" if report.gb_per_s is None else f", {report.gb_per_s:.2f} GB/s"
    found = {
        "prompt tokens": f"{report.prompt_tokens:,}",
        "tokens found by prefill": f"{report.tokens_found:,}" if report.tokens_found else "",
        "tokens loaded": f"{report.tokens_loaded:,}",
        "KV bytes": f"{report.kv_bytes:,}",
        "transfer": seconds(report.transfer_s) + speed,
        "time to first token, with the transfer": seconds(report.ttft_s),
        "of it": ", ".join(f"{name} {seconds(value)}" for name, value in report.ttft_parts_s.items()),
        "time to first token, at least": f"{seconds(report.ttft_floor_s)} (KV in place, and one copy)",
        "time to first token, recomputed": f"{seconds(report.ttft_recompute_s)} (in the decode process)",
        "connector, transport": f"{report.connector}, {report.transport or '-'}",
    }
    if report.queue:
        found["workers: prefill, decode"] = ", ".join(map(str, report.tensor_parallel))
        found["queue, communicator"] = f"{report.queue}, {report.communicator}"
    found |= {"store": report.store, "device": report.device}
    same = "yes: those of model.generate in a third process" if report.identical else "NO"
    return [
        *((name, value) for name, value in found.items() if value),
        *(("" if number else "why", reason) for number, reason in enumerate(report.reasons)),
        ("tokens identical", same),
    ]
