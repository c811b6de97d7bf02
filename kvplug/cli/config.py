"""``kvplug config``: the effective configuration with its sources, the faults of a file, a secret, and the
JSON schema."""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvplug.assembly.doctor.explanation import of_certificates
from kvplug.assembly.examination.finding import Finding
from kvplug.assembly.registry import Registry
from kvplug.assembly.registry.check import CHOSEN, name_faults, options_of
from kvplug.assembly.resolve import check_addresses
from kvplug.cli.completion import files, overrides as complete_keys
from kvplug.cli.table import show_table
from kvplug.config.addresses import DEFAULT_HOST
from kvplug.config.config import KEYS, TLS_KEYS, Config, Draft, directory_of, json_schema
from kvplug.config.options import UNIT, format_value, option_fields
from kvplug.errors import ConfigError, InsecureAddressError, PluginError
from kvplug.net.peer_text import printable
from kvplug.transport.spec import CommandSpec, Spec

config_option = click.option(
    "--config",
    "path",
    metavar="FILE",
    shell_complete=files,
    help="A .toml or .json file. Default: the one that KVPLUG_CONFIG names.",
)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the keys of KEY=VALUE, or file names if no key matches."""
    return complete_keys(ctx, param, incomplete) or files(ctx, param, incomplete)


def reads_config(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``[FILE] [KEY=VALUE]...`` to a command, which gets them as ``path`` and ``overrides``."""

    @config_option
    @click.argument("given", nargs=-1, metavar="[FILE] [KEY=VALUE]...", shell_complete=_complete)
    @functools.wraps(command)
    def with_config(path: str | None, given: tuple[str, ...], **others: Any) -> None:
        named = [each for each in given if "=" not in each]
        if wrong := [each for each in named if not each.endswith((".toml", ".json"))]:
            raise click.UsageError(f"{wrong[0]!r} was given; allowed is FILE.toml, FILE.json or KEY=VALUE")
        if path is not None:
            named.append(path)
        if len(named) > 1:
            raise click.UsageError(f"{' and '.join(named)} were given; allowed is one file")
        overrides = tuple(each for each in given if "=" in each)
        command(path=named[0] if named else None, overrides=overrides, **others)

    return with_config


@click.group()
def config() -> None:
    """Show the effective configuration, check one, make a secret, or print the schema of files."""


@config.command()
@reads_config
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def show(path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every value of the configuration, and its source.

    Precedence, highest first: KEY=VALUE, environment, file, default.
    """
    effective = Config.load(path, overrides=overrides)
    settings = _settings(effective, Registry.from_env())
    if as_json:
        plain = {
            key: {"value": value, "source": effective.source_of(key)} for key, (value, _) in settings.items()
        }
        click.echo(json.dumps(plain, indent=2, default=str))
        return
    rows = [
        (key, format_value(value, unit), effective.source_of(key)) for key, (value, unit) in settings.items()
    ]
    show_table(("KEY", "VALUE", "SOURCE"), rows)


@config.command()
def schema() -> None:
    """Print the JSON schema of configuration files.

    Editors can use it. It has the options of each installed plugin, and describes keys, types, choices and
    bounds; `kvplug config check` finds more.
    """
    tables: dict[str, list[type]] = {}
    for _, spec in Registry.from_env():
        if isinstance(spec, CommandSpec):
            continue
        try:
            options = spec.load_options()
        except PluginError as e:
            click.echo(printable(f"note: options.{spec.name}: {e}"), err=True)
            continue
        if options is not None:
            tables.setdefault(spec.name, []).append(options)
    click.echo(json.dumps(json_schema(tables), indent=2))


@config.command()
@click.argument("path", metavar="FILE", shell_complete=files)
def check(path: str) -> None:
    """Print every fault of a configuration file.

    Unknown names and the options of plugins are checked too. The environment is ignored. Exit code 1: there
    are faults; 2: the file cannot be read or parsed.
    """
    try:
        draft = Draft.load(path, environ={})
    except ConfigError as e:
        click.echo(printable(f"kvplug: {e}"), err=True)
        sys.exit(2)
    faults = [*draft.faults, *name_faults(Registry.from_env(), draft.values, draft.options)]
    notes = []
    if draft.values.get("role") is None and not any(fault.startswith("role:") for fault in draft.faults):
        notes.append("role is not set here: set it, or KVPLUG_ROLE, to producer, consumer or both")
    try:
        certificates = _check_trust(draft)
    except InsecureAddressError as e:
        notes += e.faults
    except ConfigError as e:
        faults += e.faults
    else:
        faults += (f"{each.topic}: {each.what}" for each in certificates if each.verdict == "problem")
        notes += (f"{each.topic}: {each.what}" for each in certificates if each.verdict == "note")
    if faults:
        click.echo(printable(f"kvplug: {ConfigError(*faults, source=path)}"), err=True)
    else:
        click.echo(f"{path}: no faults")
    for note in notes:
        click.echo(printable(f"note: {note}"), err=True)
    if faults:
        sys.exit(1)


@config.command()
@click.argument("path", metavar="FILE", shell_complete=files)
def secret(path: str) -> None:
    """Write a random secret into a new file.

    Only this user can read the file. Its line for a configuration is printed. Copy the file to each host of
    the deployment. Exit code 2: the file exists, or cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="ascii") as f:
            os.fchmod(fd, 0o600)
            f.write(f"{secrets.token_hex(32)}\n")
    except FileExistsError:
        click.echo(printable(f"kvplug: {path} exists and is not changed: name a new file"), err=True)
        sys.exit(2)
    except OSError as e:
        click.echo(printable(f"kvplug: {path}: {e.strerror or e}"), err=True)
        sys.exit(2)
    click.echo(f"secret_file = {json.dumps(os.path.abspath(path), ensure_ascii=False)}")


def _check_trust(draft: Draft) -> tuple[Finding, ...]:
    """Return the findings about the certificates. Raise ConfigError if the secret or a file is unusable."""
    from kvplug.net.trust.credentials import Credentials
    from kvplug.net.trust.tls import TlsFiles

    values = draft.values
    cert, key, ca = (values.get(name) for name in TLS_KEYS)
    tls = TlsFiles(cert=cert, key=key, ca=ca) if cert and key and ca else None
    credentials = Credentials.load(secret_file=values.get("secret_file"), tls=tls)
    peers = (each for each in values.get("peers", ()) if directory_of(each) is None)
    check_addresses(credentials, values.get("host", DEFAULT_HOST), peers)
    return () if tls is None else tuple(of_certificates(tls))


def _settings(effective: Config, registry: Registry) -> dict[str, tuple[Any, str]]:
    """Return the value and unit of every key, and of the options of all configured transports."""
    fields = option_fields(Config)
    found = {key: (getattr(effective, key), fields[key].metadata.get(UNIT, "")) for key in KEYS}
    for spec in _chosen(effective, registry):  # specs of one name may share an options class
        try:
            filled = None if isinstance(spec, CommandSpec) else options_of(registry, spec, effective.options)
        except (ConfigError, PluginError) as e:  # these options are shown as given
            click.echo(printable(f"note: {e}"), err=True)
            continue
        for name, field in () if filled is None else option_fields(type(filled)).items():
            unit = field.metadata.get(UNIT, "")
            found[f"options.{spec.name}.{name}"] = getattr(filled, field.name), unit
    for name, table in effective.options.items():
        for option, value in table.items():
            found.setdefault(f"options.{name}.{option}", (value, ""))
    return found


def _chosen(effective: Config, registry: Registry) -> Iterator[Spec]:
    """Yield what the config names. A transport left to "auto" is not known before the handshake."""
    for key, kind in CHOSEN.items():
        name = getattr(effective, key)
        if name == "auto":
            continue
        try:
            yield registry.get(kind, name)
        except PluginError as e:
            click.echo(printable(f"note: {key}: {e}"), err=True)
