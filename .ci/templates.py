"""Generate templates of ``kvplug new`` from the docs' examples and connector "simple", which are the same.

Usage: templates.py. A test fails if they differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs/examples"
LOOKUP = ROOT / "plugins/kvplug-lookup"
TEMPLATES = ROOT / "kvplug/cli/templates"


class Example(NamedTuple):
    """A package, or a part of one, that a template is made of."""

    name: str
    """Of what it offers."""
    modules: tuple[str, ...]
    """Those that are in the template."""
    folder: Path
    package: str
    """As imports name the folder."""
    test: Path
    """Its test, if it is in the template."""

    @classmethod
    def of_docs(cls, name: str, *modules: str) -> Example:
        folder = EXAMPLES / f"kvplug-{name}"
        package = f"kvplug_{name}"
        return cls(name, modules, folder / package, package, folder / f"{name}_contract.py")

    def generalised(self, text: str) -> str:
        """With what the template asks for in the place of this example's names."""
        for written, answer in {
            re.escape(self.package): "{{module}}",
            f"kvplug-{self.name}": "{{distribution}}",
            rf"{self.name.capitalize()}(?!Queue)": "{{title}}",
            f'"{self.name}"': '"{{name}}"',
            f"'{self.name}'": "'{{name}}'",
            rf"options\.{self.name}\.": "options.{{name}}.",
            r'check_plugin\("\w+"\)': 'check_plugin("{{name}}")',
            r"KVPLUG_API = \(1, 0\)": "KVPLUG_API = ({{api_major}}, {{api_minor}})",
        }.items():
            text = re.sub(written, answer, text)
        return text


ALL = {
    "pipe": Example.of_docs("sample", "options.py", "pipe.py", "probe.py"),
    "store": Example.of_docs("sqlite", "options.py", "store.py"),
    "connector": Example(
        "simple",
        ("entries.py", "options.py", "peer.py", "scheduler.py", "worker.py"),
        LOOKUP / "kvplug_lookup/simple",
        "kvplug_lookup.simple",
        LOOKUP / "tests/test_simple_connector_contract.py",
    ),
    "queue": Example.of_docs(
        "relay",
        *("end.py", "message.py", "plugin.py", "probe.py", "queue.py", "reader.py", "writer.py"),
    ),
    "sink": Example.of_docs("jsonl", "options.py", "plugin.py", "sink.py"),
}

for kind, example in ALL.items():
    pairs = [(example.folder / each, TEMPLATES / kind / "{{module}}" / each) for each in example.modules]
    if example.test.exists():
        pairs.append((example.test, TEMPLATES / kind / "tests" / "test_{{stem}}.py"))
    for source, target in pairs:
        text = example.generalised(source.read_text(encoding="utf-8"))
        target.with_name(f"{target.name}.jinja").write_text(text, encoding="utf-8")
