"""``kvplug explain --request``: what became of one request, from the memory of this user's engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import click

from kvplug.assembly.watched import LocalProcess
from kvplug.assembly.watching import runtime_folder, watched_sockets
from kvplug.cli.output import show_json, show_note, show_table
from kvplug.errors import KvplugError, PeerGoneError
from kvplug.metrics.spans import Span

Found = dict[str, tuple[int, Span]]
"""By the span's id, the earliest first: the process that recorded it, and the span."""


def explain_request(request_id: str, *, as_json: bool) -> bool:
    """Print where the KV of a request came from, how long each part took, and what failed. Returns whether
    any process knows the request."""
    found: Found = {}
    with contextlib.ExitStack() as stack:
        watched = [stack.enter_context(contextlib.closing(LocalProcess(path))) for path in watched_sockets()]
        watched = _ask(watched, request_id, found)
        for trace_id in {span.context.trace_id for _, span in found.values()}:
            watched = _ask(watched, trace_id, found)  # a peer engine has another id for the request
    found = dict(sorted(found.items(), key=lambda each: each[1][1].start_ns))
    if as_json:
        show_json([{"pid": pid, **attrs.asdict(span)} for pid, span in found.values()])
    elif not found:
        click.echo(
            f"no process of this user remembers a request {request_id!r} ({len(watched)} were asked, which"
            f" listen in {runtime_folder()}). A process remembers about 300 requests, until it ends."
        )
    else:
        for line in _summary(found.values()):
            click.echo(line)
        click.echo()
        show_table(("PART", "MS", "PROCESS", "DETAILS"), list(_rows(found)))
    return bool(found)


def _ask(watched: Iterable[LocalProcess], some_id: str, found: Found) -> list[LocalProcess]:
    """Ask for spans, and return the processes that have answered."""
    answered = []
    for each in watched:
        try:
            found |= {span.context.span_id: (each.pid, span) for span in each.spans_of(some_id)}
            answered.append(each)
        except PeerGoneError:
            continue
        except KvplugError as e:
            show_note(f"{each.name} does not answer: {e}")
    return answered


def _summary(spans: Iterable[tuple[int, Span]]) -> Iterator[str]:
    """Yield a sentence for each request that has ended, and one for each part that failed."""
    for pid, span in spans:
        if span.name == "request":
            about = span.attributes
            loaded = [(name.partition("num_tokens.")[2], num) for name, num in about.items()]
            came = "".join(f", {num} loaded from {name}" for name, num in loaded if name) or ", none loaded"
            first = about.get("time_to_first_token")
            after = f"; first token after {first * 1e3:.1f} ms" if isinstance(first, float) else ""
            prompt = f"{about.get('num_prompt_tokens')} tokens in the prompt"
            yield f"{span.request_id} (pid {pid}): {prompt}{came}{after}"
    for pid, span in spans:
        if span.reason:
            yield f"{span.request_id} (pid {pid}): {span.name} failed: {span.reason}"


def _rows(found: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each span, below the span that it is a part of."""
    parts: dict[str, list[tuple[int, Span]]] = {}
    for pid, span in found.values():
        parts.setdefault(span.parent_id if span.parent_id in found else "", []).append((pid, span))

    def below(parent_id: str, depth: int) -> Iterator[tuple[str, str, str, str]]:
        for pid, span in parts.get(parent_id, ()):
            about = [f"{name}={_text(value)}" for name, value in span.attributes.items()]
            if span.request_id and (span.name == "request" or not parent_id):
                about.insert(0, span.request_id)
            if span.reason:
                about.append(f"failed: {span.reason}")
            yield f"{'· ' * depth}{span.name}", f"{span.duration_ns / 1e6:.1f}", str(pid), ", ".join(about)
            yield from below(span.context.span_id, depth + 1)

    yield from below("", 0)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
