"""``kvplug config``: the effective configuration with its sources, the faults of a file, a secret, and the
JSON schema."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from kvplug.assembly.doctor.explanation import of_certificates
from kvplug.assembly.registry import Registry
from kvplug.assembly.registry.check import CHOSEN, name_faults, options_of
from kvplug.assembly.resolve import credentials_of, tls_of
from kvplug.cli import options
from kvplug.cli.completion import files
from kvplug.cli.output import show_json, show_note, show_table
from kvplug.config.config import KEYS, TLS_KEYS, Config, Draft, json_schema
from kvplug.config.options import UNIT, format_value, option_fields
from kvplug.errors import ConfigError, InsecureAddressError, PluginError
from kvplug.net.peer_text import printable
from kvplug.transport.spec import CommandSpec


@click.group()
def config() -> None:
    """Show the effective configuration, check one, make a secret, or print the schema of files."""


@config.command()
@options.reads_config
@options.as_json
def show(load: Callable[[], Config], as_json: bool) -> None:
    """Print every value of the configuration, and its source.

    Precedence, highest first: KEY=VALUE, environment, file, default.
    """
    effective = load()
    settings = _settings(effective, Registry.from_env())
    if as_json:
        show_json({key: {"value": value, "source": effective.source_of(key)} for key, value, _ in settings})
    else:
        rows = [(key, format_value(value, unit), effective.source_of(key)) for key, value, unit in settings]
        show_table(("KEY", "VALUE", "SOURCE"), rows)


def _settings(effective: Config, registry: Registry) -> list[tuple[str, Any, str]]:
    """Return the key, value and unit of every setting and option. Defaults of options are included if the
    configuration names their plugin's offer; a transport left to "auto" is not known before the handshake."""
    found = _values("", effective, KEYS)
    for key, kind in CHOSEN.items():
        name = getattr(effective, key)
        if name == "auto":
            continue
        try:
            spec = registry.get(kind, name)
            filled = options_of(registry, spec, effective.options)
        except (ConfigError, PluginError) as e:  # these options are shown as given
            show_note(f"{key}: {e}")
            continue
        if filled is not None:
            found |= _values(f"options.{spec.name}.", filled, option_fields(type(filled)))
    for name, table in effective.options.items():
        for option, value in table.items():
            found.setdefault(f"options.{name}.{option}", (value, ""))
    return [(key, value, unit) for key, (value, unit) in found.items()]


def _values(prefix: str, of: Any, keys: Any) -> dict[str, tuple[Any, str]]:
    fields = option_fields(type(of))
    return {
        f"{prefix}{key}": (getattr(of, fields[key].name), fields[key].metadata.get(UNIT, "")) for key in keys
    }


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
            if (cls := spec.load_options()) is not None:
                tables.setdefault(spec.name, []).append(cls)
        except PluginError as e:
            show_note(f"options.{spec.name}: {e}")
    show_json(json_schema(tables))


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
        _fail(str(e))
    faults: list[str] = [*draft.faults, *name_faults(Registry.from_env(), draft.values, draft.options)]
    notes = []
    if draft.values.get("role") is None and not any(fault.startswith("role:") for fault in draft.faults):
        notes.append("role is not set here: set it, or KVPLUG_ROLE, to producer, consumer or both")
    trust = ("host", "peers", "secret_file", "tls_check_host", *TLS_KEYS)
    try:
        trusted = Config(**{key: draft.values[key] for key in trust if key in draft.values})
        credentials_of(trusted)
        files_of_tls = tls_of(trusted)
        for each in () if files_of_tls is None else of_certificates(files_of_tls):
            if each.verdict != "ok":
                (faults if each.verdict == "problem" else notes).append(f"{each.topic}: {each.what}")
    except InsecureAddressError as e:  # the secret may be in the environment
        notes += e.faults
    except ConfigError as e:
        faults += (fault for fault in e.faults if fault not in faults)
    if not faults:
        click.echo(f"{path}: no faults")
    for note in notes:
        show_note(note)
    if faults:
        _fail(str(ConfigError(*faults, source=path)), 1)


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
        _fail(f"{path} exists and is not changed: name a new file")
    except OSError as e:
        _fail(f"{path}: {e.strerror or e}")
    click.echo(f"secret_file = {json.dumps(os.path.abspath(path), ensure_ascii=False)}")


def _fail(text: str, code: int = 2) -> NoReturn:
    click.echo(printable(f"kvplug: {text}"), err=True)
    sys.exit(code)
