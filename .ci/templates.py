"""Generate templates of ``kvplug new`` from the examples of the docs, which are the same packages.

Usage: templates.py. A test fails if they differ.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs/examples"
TEMPLATES = ROOT / "kvplug/cli/templates"
MODULES = {
    "pipe": ("sample", ("light.py", "pipe.py")),
    "store": ("sqlite", ("options.py", "store.py")),
    "connector": ("shelf", ("folder.py", "options.py", "plugin.py", "scheduler.py", "worker.py")),
    "queue": (
        "relay",
        ("end.py", "message.py", "plugin.py", "probe.py", "queue.py", "reader.py", "writer.py"),
    ),
    "sink": ("jsonl", ("options.py", "plugin.py", "sink.py")),
}
"""For each template, the name of the example, and its modules that are in the template."""


def answers(name: str) -> dict[str, str]:
    """What stands in an example, and what the template asks for in its place."""
    return {
        f"kvplug_{name}": "{{module}}",
        f"kvplug-{name}": "{{distribution}}",
        name.capitalize(): "{{title}}",
        f'"{name}"': '"{{name}}"',
        f"'{name}'": "'{{name}}'",
        f"options.{name}.": "options.{{name}}.",
        "KVPLUG_API = (1, 0)": "KVPLUG_API = ({{api_major}}, {{api_minor}})",
    }


def write(example: Path, template: Path, name: str) -> None:
    """The template that gives this file."""
    text = example.read_text(encoding="utf-8")
    for written, answer in answers(name).items():
        text = text.replace(written, answer)
    template.write_text(text, encoding="utf-8")


for kind, (name, modules) in MODULES.items():
    package, target = EXAMPLES / f"kvplug-{name}", TEMPLATES / kind
    for module in modules:
        write(package / f"kvplug_{name}" / module, target / "{{module}}" / f"{module}.jinja", name)
    if (test := package / f"{name}_contract.py").exists():
        write(test, target / "tests" / "test_{{stem}}.py.jinja", name)
