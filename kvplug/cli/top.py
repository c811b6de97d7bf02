"""``kvplug top``: what engines and stores do now, again and again."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.state import PipeState, SideState
from kvplug.assembly.watched import LocalProcess, PeerProcess, WatchedProcess
from kvplug.assembly.watching import runtime_folder, watched_sockets
from kvplug.cli import options
from kvplug.cli.duration import Duration
from kvplug.cli.output import paragraph, show_json
from kvplug.config.addresses import Address
from kvplug.config.config import Config
from kvplug.config.units import bytes_in_words
from kvplug.errors import ConfigError, KvplugError, PeerGoneError
from kvplug.metrics.stats import Counts, parts_of
from kvplug.net.peer_text import printable
from kvplug.net.wire import from_plain

if TYPE_CHECKING:
    from rich.text import Text

_INTERVAL_S: Final = 2.0
_MAX_ASKED: Final = 16
"""The most processes that are asked at once."""
_BYTES, _TOKENS = 1, 2
"""The places of an operation's bytes and tokens among its numbers."""
_MOST: Final = 5
"""The most links, pipes, loads and other details of one kind that are shown for a process."""
_BAR: Final = 10
_ID: Final = 12
"""The first characters of an engine's id, which are shown."""
_HEAD: Final = (
    f"{'':12}{'PID':>8}{'UP':>6}{'MATCHED':>9}{'TOKENS':>9}"
    f"{'IN GB/s':>9}{'OUT GB/s':>9}{'LOADS':>6}{'WAIT':>5}{'HELD':>5}"
)


def _checked(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for address in given:
        try:
            Address.parse_server(address)
        except ConfigError as e:
            raise click.BadParameter(e.faults[0]) from e
    return given


@click.command("top")
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1, callback=_checked)
@click.option("--once", is_flag=True, help="Print the state once, with counts since each process started.")
@click.option(
    "--interval",
    metavar="DURATION",
    type=Duration(),
    default=_INTERVAL_S,
    help=f"The time between two refreshes, such as 5 or 500ms. Default: {_INTERVAL_S:g} s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON once, for programs.")
@options.sets_config
def top(addresses: tuple[str, ...], once: bool, interval: float, as_json: bool, config: Config) -> None:
    """Show what engines and stores do now, until Ctrl-C.

    Shows every engine and every `kvplug store serve` that this user runs on this host, or those at each
    ADDRESS (host:port, unix:@name): that of a worker of an engine, which answers for its scheduler too, or of
    a store. An engine that only loads has no address. The secret and TLS files of the configuration prove who
    asks. Nothing has to be restarted, and asking costs an engine next to nothing.

    For each process: requests matched and their tokens found elsewhere, and the bytes that came in and went
    out, since the last refresh; loads in flight, requests that wait for an answer, and requests whose blocks
    are held; then its links, pipes with the rate measured beside the one claimed, stores, and failures. If
    the output is not a terminal that can be refreshed, it is printed once. Exit code 1: nothing was found.

    \b
    kvplug top
    kvplug top 10.0.0.5:29555 10.0.0.6:29555 --config kvplug.toml
    kvplug top --once --json
    """
    with contextlib.closing(_Sources(config, addresses)) as sources:
        if once or as_json or not _can_refresh():
            sys.exit(0 if _show_once(sources, as_json=as_json) else 1)
        _show_live(sources, interval)


def _can_refresh() -> bool:
    from rich.console import Console

    console = Console()
    return sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal


def _show_once(sources: _Sources, *, as_json: bool) -> bool:
    """Print the state, and return whether any process answered."""
    from rich.console import Console

    found = sources.ask()
    if as_json:
        show_json([each.as_json() for each in found])
    else:
        width = max(shutil.get_terminal_size().columns, len(_HEAD))
        Console(width=width).print(_text_of([*lines_of(found), *_problems(sources, found)]))
    return not all(each.error for each in found)


def _show_live(sources: _Sources, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            found, height = sources.ask(), console.size.height
            head = f"kvplug top  {time.strftime('%H:%M:%S')}  every {interval:g} s; Ctrl-C ends it"
            lines = [head, "", *lines_of(found), *_problems(sources, found)]
            if len(lines) > height:
                lines = [*lines[: height - 1], f"... and {len(lines) - height + 1} more lines"]
            live.update(_text_of(lines), refresh=True)
            time.sleep(interval)


def _text_of(lines: Iterable[str]) -> Text:
    """Return lines that are cut to the width of the terminal."""
    from rich.text import Text

    return Text(printable("\n".join(lines)), no_wrap=True, overflow="ellipsis")


def _problems(sources: _Sources, found: Sequence[Shown]) -> Iterator[str]:
    """Yield lines on the processes that do not answer, or that there are none."""
    texts = [f"{each.name} does not answer: {each.error}" for each in found if each.error]
    for text in texts if found else [sources.nothing]:
        yield from paragraph("", text).splitlines()


# -- the processes -------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Shown:
    """A process, and what it answered at the last two times."""

    name: str
    """The address, or the pid, by which it was asked."""
    side: SideState = attrs.field(factory=SideState)
    """What it answered."""
    error: str = ""
    """Why it did not answer."""
    at: float = 0.0
    counts: Counts = attrs.field(factory=dict)
    """Its counters; see :func:`~kvplug.metrics.stats.parts_of`."""
    before: Counts | None = None
    """Its counters one refresh earlier."""
    elapsed_s: float = 0.0

    def answer(self, side: SideState) -> None:
        """Note what the process has answered."""
        now, last = time.monotonic(), self.side
        self.before = self.counts if last.pid == side.pid and last.seconds <= side.seconds else None
        self.elapsed_s, self.at = now - self.at, now
        self.side, self.error = side, ""
        try:
            self.counts = parts_of(side.stats)[0]
        except ValueError:  # of a process with other counters
            self.counts = {}

    def as_json(self) -> dict[str, Any]:
        """Return the whole state, or why there is none."""
        return {"name": self.name, "error": self.error, **({} if self.error else attrs.asdict(self.side))}

    def new(self, *key: str, figure: int = 0) -> float:
        """Return how much a number has grown since the last refresh, or since the start at the first."""
        now, before = self.counts.get(key), (self.before or {}).get(key)
        return 0 if now is None else max(0, now[figure] - (before[figure] if before else 0))

    def growing(self, *part: str) -> dict[str, float]:
        """Return by its last name how much each counter of a part has grown, if it has."""
        found = {key[-1]: self.new(*key) for key in self.counts if key[:-1] == part}
        return {name: new for name, new in found.items() if new}

    def gb_per_s(self, *ops: str) -> str:
        """Return the highest rate among these operations, which count the same bytes at different places."""
        if self.before is None or self.side.side == "scheduler":
            return "-"
        return f"{max(self.new('ops', op, figure=_BYTES) for op in ops) / 1e9 / self.elapsed_s:.3f}"


class _Sources:
    """The processes that are asked."""

    def __init__(self, config: Config, addresses: Sequence[str]) -> None:
        self._are_given = bool(addresses)
        self._sources: dict[Path | str, tuple[WatchedProcess, list[Shown]]] = {}
        """By socket or address: the process, and what it answered last."""
        if addresses:
            resolved = ResolvedConfig(config)
            self._sources = {address: (PeerProcess(resolved, address), []) for address in addresses}
        self._pool = ThreadPoolExecutor(_MAX_ASKED, "kvplug-top")

    @property
    def nothing(self) -> str:
        """The sentence to show if nothing was found."""
        folder = runtime_folder()
        return (
            f"no engine or store of this user was found: no process listens in {folder}, and one with another"
            " XDG_RUNTIME_DIR, or without it, listens elsewhere. Those of other users and hosts: kvplug top"
            " ADDRESS. An engine with doctor = 'off' is not shown."
        )

    def ask(self) -> list[Shown]:
        """Ask all processes at once, and return those that are still there."""
        if not self._are_given:
            paths = watched_sockets()
            for gone in self._sources.keys() - {*paths}:
                self._sources.pop(gone)[0].close()
            for path in paths:
                self._sources.setdefault(path, (LocalProcess(path), []))
        return [*itertools.chain.from_iterable(self._pool.map(self._ask, self._sources.values()))]

    @staticmethod
    def _ask(source: tuple[WatchedProcess, list[Shown]]) -> list[Shown]:
        process, shown = source
        try:
            sides = process.states()
        except KvplugError as e:
            shown.clear()
            has_ended = isinstance(e, PeerGoneError) and isinstance(process, LocalProcess)
            return [] if has_ended else [Shown(process.name, error=str(e))]
        shown[len(sides) :] = [Shown(process.name) for _ in sides[len(shown) :]]
        for each, side in zip(shown, sides, strict=True):
            each.answer(side)
        return [*shown]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for process, _ in self._sources.values():
            process.close()


# -- the lines -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class _Request:
    request_id: str
    source: str = ""
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class _Status:
    """The keys of a connector's status that are shown."""

    loads: tuple[_Request, ...] = ()
    num_loads: int = 0
    waiting: tuple[_Request, ...] = ()
    num_waiting: int = 0
    num_held: int = 0


def lines_of(found: Iterable[Shown]) -> Iterator[str]:
    """Yield the lines for the processes that have answered: a block for each engine."""
    engines: dict[tuple[str, str, str], dict[tuple[str, str, int], Shown]] = {}
    for each in found:
        if not each.error:  # the workers of an engine answer for the same scheduler
            side = each.side
            sides = engines.setdefault((side.engine_id, side.connector, side.role), {})
            sides.setdefault((side.side, side.rank.zfill(_ID), side.pid), each)
    if engines:
        yield _HEAD
    for (engine_id, connector, role), sides in sorted(engines.items(), key=lambda each: each[0][1] == ""):
        name = engine_id[:_ID]
        yield f"engine {name}: {connector}, {role}" if connector else f"store server {name}"
        for _, each in sorted(sides.items(), key=lambda each: each[0]):
            yield from _lines_of(each)
        yield ""


def _lines_of(shown: Shown) -> Iterator[str]:
    state = shown.side
    try:
        status = from_plain(state.status, _Status, "its status")
    except KvplugError:  # of a connector with another status
        status = _Status()
    numbers = status.num_loads, status.num_waiting, status.num_held
    loads, waiting, held = (str(each) if each else "-" for each in numbers)
    is_scheduler = state.side == "scheduler"
    matched = _short(shown.new("ops", "match")) if is_scheduler else "-"
    tokens = _short(shown.new("ops", "match", figure=_TOKENS)) if is_scheduler else "-"
    yield (
        f"{f'{state.side} {state.rank}':<12}{state.pid:>8}{_age(state.seconds):>6}{matched:>9}{tokens:>9}"
        f"{shown.gb_per_s('load', 'recv'):>9}{shown.gb_per_s('save', 'send'):>9}"
        f"{loads:>6}{waiting:>5}{held:>5}"
    )
    details = {
        "missed": _missed(shown),
        "link": [
            f"{each.peer} (engine {each.engine_id[:_ID]}), {each.purpose}, {_age(each.seconds)}"
            for each in reversed(state.links)
        ],
        "pipe": [_pipe(each) for each in reversed(state.pipes)],
        "store": [
            f"{each.name} ({each.medium}) {_fill(each.used_bytes, each.budget_bytes)},"
            f" {_short(each.num_pages)} pages"
            for each in state.stores
        ],
        "load": [f"{each.request_id} from {each.source}, {each.seconds:.1f} s" for each in status.loads],
        "waits": [f"{each.request_id}, {each.seconds:.1f} s" for each in status.waiting],
        "failed": _failed(shown.counts),
    }
    hidden = {
        "link": state.num_links - len(state.links),
        "pipe": state.num_pipes - len(state.pipes),
        "load": status.num_loads - len(status.loads),
        "waits": status.num_waiting - len(status.waiting),
    }
    for kind, lines in details.items():
        for line in lines[:_MOST]:
            yield f"  {kind:<7} {line}"
        if more := len(lines[_MOST:]) + hidden.get(kind, 0):
            yield f"  {kind:<7} ... and {more} more"


def _missed(shown: Shown) -> list[str]:
    """Return why requests were not matched, and where their pages are not, since the last refresh."""
    found = [f"{reason} {new:.0f}" for reason, new in shown.growing("failures", "match").items()]
    pages = [f"{new:.0f} pages not in {name}" for name, new in shown.growing("not_held").items()]
    return [", ".join([*found, *pages])] if found or pages else []


def _failed(counts: Counts) -> list[str]:
    """Return the most frequent failures since the start, apart from misses."""
    failures = [
        (count, f"{key[1]} {key[2]}")
        for key, (count, *_) in counts.items()
        if key[0] == "failures" and key[1] not in ("match", "lookup")
    ]
    worst = sorted(failures, reverse=True)[:_MOST]
    return [", ".join(f"{name} {_short(count)}" for count, name in worst)] if worst else []


def _pipe(pipe: PipeState) -> str:
    rate = "" if pipe.gb_per_s is None else f" {pipe.gb_per_s:.3g} GB/s"
    claim = "" if pipe.claimed_gb_per_s is None else f" (claims {pipe.claimed_gb_per_s:.3g} GB/s)"
    moved = f"{bytes_in_words(pipe.sent_bytes)} out, {bytes_in_words(pipe.received_bytes)} in"
    where = ", ".join(filter(None, (pipe.peer.partition(" (")[0], pipe.route)))
    return f"{pipe.transport}{rate}{claim}, {moved}, {where}"


def _fill(used: int, budget: int | None) -> str:
    if not budget:
        return bytes_in_words(used)
    share = min(1.0, used / budget)
    full = round(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%} of {bytes_in_words(budget)}"


def _short(number: float) -> str:
    """Return a count in at most 6 characters."""
    unit = ""
    for more in "kMGT":
        if number >= 1000:
            number, unit = number / 1000, more
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
