"""The shape of the tree: what every package has, and which versions are said where."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest

import kvplug

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
BY_MODULE_PATH = {"kvplug-lmcache"}  # no entry point: the engine is told the module of the class
TOOLS = {"kvplug-testing", "kvplug-bench"}  # ours, and released with the core: no example of a plugin


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="the wheel is tested under tox only")
def test_what_is_tested_is_the_wheel_not_the_tree() -> None:
    assert "site-packages" in Path(kvplug.__file__).parts


@pytest.mark.parametrize("plugin", PLUGINS, ids=name)
def test_a_plugin_has_no_code_in_its_init_a_typed_marker_and_one_entry_point(plugin: Path) -> None:
    short = plugin.name.removeprefix("kvplug-").replace("-", "_")
    package = plugin / f"kvplug_{short}"
    body = ast.parse((package / "__init__.py").read_text()).body
    assert plugin.name in TOOLS or all(isinstance(each, ast.Expr) for each in body), "at most a docstring"
    assert (package / "py.typed").exists()
    groups = project(plugin).get("entry-points", {})
    if plugin.name in BY_MODULE_PATH:
        assert not groups
        return
    assert plugin.name == "kvplug-testing" or len(groups) == 1
    group, entries = next(iter(groups.items()))
    ((entry, target),) = entries.items()
    module, _, function = target.partition(":")
    assert module == f"kvplug_{short}.plugin"
    if group == "kvplug":
        assert (entry, function) == (plugin.name.removeprefix("kvplug-"), "")
    else:  # an engine's: kvplug is the plugin there, and the engine calls a function
        assert entry == "kvplug" and function


def test_all_packages_have_one_version() -> None:
    assert len(PLUGINS) > 10
    assert {project(folder)["version"] for folder in (ROOT, *PLUGINS)} == {kvplug.__version__}


def test_the_lowest_constraints_are_the_floors_of_the_metadata() -> None:
    metadata = project(ROOT)
    wanted = [*metadata["dependencies"], *metadata["optional-dependencies"]["prometheus"]]
    wanted += project(ROOT / "plugins/kvplug-testing")["dependencies"]
    pinned = (ROOT / "constraints-lowest.txt").read_text().splitlines()

    def versions(lines: list[str], sign: str) -> dict[str, tuple[int, ...]]:
        pairs = [line.split(sign) for line in lines if sign in line and not line.startswith("#")]
        return {name.lower(): tuple([*map(int, version.split(".")), 0, 0][:3]) for name, version in pairs}

    assert versions(pinned, "==") == versions(wanted, ">=")


def test_the_architecture_page_names_every_room_and_none_that_is_gone() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.+) \|$", page, re.M))
    assert len(rows) > 7
    for group, text in rows.items():
        named = set(re.findall(r"`([a-z_]+)`", text))
        paths = (ROOT / "kvplug" / group).iterdir()
        there = {path.stem for path in paths if path.suffix in ("", ".py") and path.name[0] != "_"}
        if " and what commands share" in text or " and the builders" in text:
            there &= named
        assert named == there, group
    sources = [str(path) for folder in ("kvplug", "plugins") for path in (ROOT / folder).rglob("*.*")]
    drawn = set(re.findall(r"\b([a-z_/]+\.(?:py|c))\b", page))
    assert len(drawn) > 20
    assert not {name for name in drawn if not any(path.endswith(f"/{name}") for path in sources)}
