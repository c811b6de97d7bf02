"""``kvplug explain``: what a config would do here, step by step, with reasons."""

from __future__ import annotations

import json
import sys

import attrs
import click

from kvplug.assembly.doctor.explanation import explain as findings_of, faults_of_file
from kvplug.assembly.registry import Registry
from kvplug.cli.config import reads_config
from kvplug.cli.findings import show_findings
from kvplug.config.config import Config
from kvplug.errors import ConfigError


@click.command("explain")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--quiet", is_flag=True, help="Show notes and problems only, and how many others there are.")
@reads_config
def explain(path: str | None, as_json: bool, quiet: bool, overrides: tuple[str, ...]) -> None:
    """Explain what this configuration would do here: which connector, stores and transport it would use and
    why, which peers it would accept, and what it would verify.

    Nothing is started or written. Exit code 1: an engine could not start with it, or nothing would move.
    """
    try:
        findings = findings_of(Config.load(path, overrides=overrides), Registry.from_env())
    except ConfigError as e:
        findings = faults_of_file(e)
    if as_json:
        click.echo(json.dumps([attrs.asdict(each) for each in findings], indent=2))
    else:
        show_findings(findings, quiet=quiet, details=True)
    if any(each.verdict == "problem" for each in findings):
        sys.exit(1)
