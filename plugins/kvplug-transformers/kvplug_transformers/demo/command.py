"""``kvplug demo`` and its two halves. Imports nothing heavy: models run in other processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from kvplug import Config, Duration, KvplugError
from kvplug_transformers.demo.settings import DemoSettings, Report, builtin_prompt

_LONGEST_PROMPT = 4 << 20
"""In bytes; more than any model's context, and small enough if the path is wrong."""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

Command = Callable[..., Any]


class WorkerCounts(click.ParamType[tuple[int, int]]):
    """The workers of the prefill engine and of the decode engine, as "3" or "3:1"."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        first, colon, second = value.partition(":")
        counts = [first, second if colon else first]
        if not all(count.isascii() and count.isdigit() and 0 < int(count) <= 64 for count in counts):
            self.fail(f"{value!r} was given; expected is a number of workers, as in 3, or two, as in 3:1")
        return int(counts[0]), int(counts[1])


def _all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds these options, in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_shared = _all_of(
    click.option("--prompt", help="The prompt. By default a built-in one of about 1,000 tokens."),
    click.option("--prompt-file", type=_FILE, help="Read the prompt from this file."),
    click.option(
        "--model", type=_FOLDER, help="A Hugging Face folder instead of the packaged SmolLM2-135M-Instruct."
    ),
    click.option("--connector", metavar="NAME", help="A connector that `kvplug list` shows."),
    click.option(
        *("--store", "stores"),
        metavar="NAME",
        multiple=True,
        help="Keep the KV in this store: host (memory) or fs (disk); repeat for a second one behind it. The"
        " prefill worker then loads KV that an earlier run left there.",
    ),
    click.option("--transport", metavar="NAME", help='"auto", or a pipe that `kvplug list` shows.'),
    click.option("--config", type=_FILE, help="A config file, kvplug.toml or .json."),
    click.option(
        "--block-size", type=click.IntRange(1, 1024), default=16, help="The number of tokens in a block."
    ),
    click.option("--layout", type=click.Choice(["KBTHD", "KBHTD"]), help="The memory layout of a block."),
    click.option("--integrity", metavar="auto|off|HASH", help="The hash that detects corrupted KV."),
    click.option(
        "--tensor-parallel",
        metavar="N[:M]",
        type=WorkerCounts(),
        default="1",
        help="How many workers share the model, in processes of their own: N in each engine, or N in the"
        " prefill engine and M in the decode engine.",
    ),
    click.option(
        "--policy",
        type=click.Choice(["recompute", "fail"]),
        default="recompute",
        help="What to do when KV fails to load.",
    ),
    click.option(
        "--device",
        metavar="NAME",
        help='The device of the models and of the KV: "cpu", "cuda", "cuda:1". By default the config\'s,'
        ' which is "cpu" by default.',
    ),
    click.option(
        *("--patience", "patience_s"),
        metavar="DURATION",
        type=Duration(),
        default=300,
        help="Give up when a process reports nothing for this long, beyond the config's timeouts.",
    ),
)
"""Options of the demo and of both its halves."""
_generates = _all_of(
    click.option(
        "--max-new-tokens", type=click.IntRange(1), default=64, help="Tokens to decode after the prompt."
    ),
    click.option(
        "--repeat",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Measure the time to the first token N more times, in turns with its floor.",
    ),
    click.option(
        "--at-once",
        type=click.IntRange(1, 64),
        default=1,
        metavar="N",
        help="With --repeat: measure the time until this many concurrent requests for the prompt all have"
        " their first token.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
)
_corrupts = click.option(
    "--corrupt", is_flag=True, help="Flip bits of the KV in transit, to see the effect of integrity checking."
)


def _settings(
    *,
    prompt: str | None,
    prompt_file: Path | None,
    stores: tuple[str, ...],
    corrupt: bool = False,
    **rest: Any,
) -> DemoSettings:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    if prompt_file is not None:
        prompt = _read(prompt_file)
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")
    if prompt is not None and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise click.UsageError("the prompt is not valid UTF-8")
    given = {key: rest.pop(key) for key in ("connector", "transport", "integrity", "device")}
    overrides: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if stores:
        overrides["stores"] = list(stores)
        if "fs" in stores and "path" not in Config.load(rest["config"]).options.get("fs", {}):
            from kvplug_transformers.model.cache import cache_folder

            overrides["options.fs.path"] = str(cache_folder() / "pages")
    if corrupt:
        overrides["options.host.map"] = False  # otherwise the KV crosses no pipe that could flip bits
    return DemoSettings(prompt=prompt or builtin_prompt(), overrides=overrides, corrupt=corrupt, **rest)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(_LONGEST_PROMPT + 1)
        text = data.decode("utf-8")
    except OSError as e:
        raise click.UsageError(f"{file} cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise click.UsageError(f"{file} is not UTF-8 text") from e
    if len(data) > _LONGEST_PROMPT:
        raise click.UsageError(f"{file} has more than {_LONGEST_PROMPT:,} bytes, too many for a prompt")
    return text


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: kill the workers and wait for them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _conduct(program: str, *arguments: Any, as_json: bool, **options: Any) -> None:
    """Run one of the demo's programs, show its report, and exit: with 0 only if all is well, with 130 if
    interrupted.
    """
    settings = _settings(**options)
    from kvplug_transformers.demo.display import Display
    from kvplug_transformers.demo.runs import Demo, DemoError
    from kvplug_transformers.model.bundled import ModelMissingError

    try:
        with (
            _terminated_like_interrupted(),
            Display(quiet=as_json) as display,
            Demo(settings, display) as running,
        ):
            report: Report | None = getattr(running, program)(*arguments)
        if report is not None and as_json:
            click.echo(json.dumps(attrs.asdict(report)))
        elif report is not None:
            display.table(report)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout is gone: write nothing more there, even when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except (KvplugError, DemoError, ModelMissingError, OSError) as e:
        raise click.ClickException(str(e)) from e
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        raise SystemExit(130) from None
    if report is not None and not report.ok:
        raise SystemExit(1)


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@_shared
@_generates
@_corrupts
@click.pass_context
def demo(context: click.Context, /, as_json: bool, **options: Any) -> None:
    """Move a real model's KV cache between two processes.

    A prefill worker computes a prompt. The config's connector and transport move its KV cache to a decode
    worker, which continues without computing the prompt again. A third process, without kvplug, generates
    from the same prompt: the tokens must be identical.

    The exit status is 0 only if they are, and if KV was loaded.
    """
    if context.invoked_subcommand is None:
        _conduct("run", as_json=as_json, **options)


@demo.command(short_help="Compute the prompt, in the first of two terminals.")
@_shared
@_corrupts
@click.option("--listen", metavar="ADDRESS", help="host:port or unix:@name. By default the config's.")
def prefill(listen: str | None, **options: Any) -> None:
    """Compute the prompt and keep its KV until Ctrl-C, in the first of two terminals.

    Prints the command for the second terminal.
    """
    _conduct("run_prefill", listen, as_json=False, **options)


@demo.command(short_help="Load its KV and decode, in the second terminal.")
@_shared
@_generates
@click.option(
    "--connect", metavar="CONTACT", help="What the first terminal printed. By default the config's address."
)
def decode(connect: str | None, as_json: bool, **options: Any) -> None:
    """Load the prompt's KV from the prefill worker and decode, in the second terminal.

    The prompt must be the same.
    """
    _conduct("run_decode", connect, as_json=as_json, **options)
