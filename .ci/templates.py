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
}
"""For each template, the name of the example, and its modules that are in the template."""


def answers(name: str) -> dict[str, str]:
    """What stands in an example, and what the template asks for in its place."""
    return {
        f"kvplug_{name}": "{{module}}",
        f"kvplug-{name}": "{{distribution}}",
        name.capitalize(): "{{title}}",
        f'"{name}"': '"{{name}}"',
    }


for template, (name, modules) in MODULES.items():
    for module in modules:
        text = (EXAMPLES / f"kvplug-{name}" / f"kvplug_{name}" / module).read_text(encoding="utf-8")
        for written, answer in answers(name).items():
            text = text.replace(written, answer)
        (TEMPLATES / template / "{{module}}" / f"{module}.jinja").write_text(text, encoding="utf-8")
