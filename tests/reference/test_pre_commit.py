"""A commit is checked by the commands that the matrix runs."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_commit_is_checked_by_the_commands_of_lint_and_types() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    commands = [
        command.removesuffix(" {posargs}")
        for name in ("lint", "types")
        for command in tox[f"testenv:{name}"]["commands"].split("\n")
        if command
    ]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^ *entry: (?:env \S+ )?\.venv/bin/(.*)$", hooks, re.M) == commands
