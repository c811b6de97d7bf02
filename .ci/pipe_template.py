"""Generate the template of ``kvplug new transport`` from the sample of the docs, which is the same pipe.

Usage: pipe_template.py. A test fails if the two differ.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "docs/examples/kvplug-sample/kvplug_sample"
TEMPLATE = ROOT / "kvplug/cli/templates/pipe/{{module}}"
NAMES = {
    "kvplug_sample": "{{module}}",
    "kvplug-sample": "{{distribution}}",
    "Sample": "{{title}}",
    '"sample"': '"{{name}}"',
}

for module in ("light.py", "pipe.py"):
    text = (SAMPLE / module).read_text(encoding="utf-8")
    for name, answer in NAMES.items():
        text = text.replace(name, answer)
    (TEMPLATE / f"{module}.jinja").write_text(text, encoding="utf-8")
