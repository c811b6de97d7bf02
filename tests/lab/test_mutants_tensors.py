"""Every fault that is known is caught by a test of the law that it breaks, and every law has one.

``judging.py`` defines when a test has caught a fault. The first mutant of each law lacks the marker
``full``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import judging
from judging import FILES, LIFE_S, controls, judge, mutants
from kvplug_testing.laws import LAWS

pytestmark = pytest.mark.mutant


def breaches() -> Iterator[Any]:
    """A file, a mutant and a law that it breaks; all but the first mutant of each law are marked ``full``."""
    laws: set[str] = set()
    for path in FILES:
        for name, cls in mutants(path).items():
            for id_ in cls.breaks:
                marks = [pytest.mark.full] if id_ in laws else []
                laws.add(id_)
                yield pytest.param(path, name, id_, id=f"{path.stem}: {name} breaks {id_}", marks=marks)


@pytest.fixture(scope="session")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kit's verdict on a file's mutants. They wait more than they work: four files are judged at once."""
    asked: dict[Path, set[str]] = {}
    for item in request.session.items:
        spec = getattr(item, "callspec", None)
        if spec is not None and "name" in spec.params and spec.params.get("path") in FILES:
            asked.setdefault(spec.params["path"], set()).add(spec.params["name"])
    with ThreadPoolExecutor(4) as pool:
        verdicts = {
            path: pool.submit(judge, path, tmp_path_factory.mktemp(path.stem), *names, *controls(path))
            for path, names in asked.items()
        }
        yield lambda path: verdicts[path].result()


@pytest.mark.timeout(2 * LIFE_S)
@pytest.mark.parametrize(("path", "name", "id_"), [*breaches()])
def test_a_mutant_is_caught_by_a_test_of_its_law(judged: Any, path: Path, name: str, id_: str) -> None:
    card, output = judged(path)
    failed = judging.failures_of_controls(path, card)
    assert not failed, "\n".join([*failed, output])
    caught = judging.catching(path, name, id_, card)
    if not caught and (reason := judging.reason_without_hosts(name, card)):
        pytest.skip(reason)
    assert caught, f"{mutants(path)[name].__doc__} No test noticed it that its control passes:\n{output}"


# A plugin is an installed package and no class: the faulty ones are in test_check_plugin.py.
@pytest.mark.parametrize("id_", [id_ for id_ in LAWS if not id_.startswith("PLUGIN-")])
def test_a_law_has_a_mutant(id_: str) -> None:
    assert id_ in {law for path in FILES for cls in mutants(path).values() for law in cls.breaks}
