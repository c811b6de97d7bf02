"""Which tests of the conformance kit catch which mutant, and what has changed in that.

    python tests/lab/matrix.py before.jsonl                     # judge all mutants
    python tests/lab/matrix.py before.jsonl stores pipes.TestX  # judge these: a file of mutants, and one
    python tests/lab/matrix.py --compare before.jsonl after.jsonl

Each mutant and its controls run in a process of their own: the quick tests of the laws that the mutant
breaks, and long ones until one has caught it. The result of each mutant is added to the file at once, as a
line; the last line of a mutant counts. A second start judges a mutant only if it has no result, or if its
file or the kit has changed; changes of the core do not count. Tests that did not run, because three others
had hung, are listed as "...".

Exit codes: 0; 1 if no test catches a mutant, or a mutant has no result; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

import judging
import kvplug_testing
from judging import Results, results_of
from kvplug_testing.scorecard import Scorecard

KIT: Final = Path(kvplug_testing.__file__).parent
LEVEL: Final = "quick"
"""Of the tests that run on a mutant which is caught already."""
UNRUN: Final = "..."

# -- results ---------------------------------------------------------------------------------------


def rows_of(results: Results) -> dict[tuple[str, str], set[str]]:
    """The tests that catch a mutant, by its name and by the law that it breaks."""
    return {
        (mutant, law): {*tests}
        for mutant, result in results.items()
        for law, tests in result["caught"].items()
    }


def differences(before: Results, after: Results) -> Iterator[str]:
    """What tests no longer catch, in sentences. Mutants that are caught by no test come first."""
    old, new = rows_of(before), rows_of(after)
    counts = Counter((mutant.partition(".")[0], law) for (mutant, law), tests in new.items() if tests)
    for mutant, law in sorted(key for key, tests in new.items() if not tests):
        others = counts[mutant.partition(".")[0], law]
        was = ", ".join(sorted(old.get((mutant, law), ()))) or "no test"
        yield (
            f"{mutant} is caught by no test of {law}. Before: {was}."
            f" Other mutants of its file that tests of {law} catch: {others}"
        )
    for mutant, law in sorted(old):
        now = new.get((mutant, law))
        if now is None:
            yield f"{mutant} no longer exists, or no longer breaks {law}"
        elif now and (lost := old[mutant, law] - now - {UNRUN}):
            left = len(now - {UNRUN})
            yield f"{mutant} is caught by {left} tests of {law}, no longer by {', '.join(sorted(lost))}"


# -- the run ---------------------------------------------------------------------------------------


def stamp_of(path: Path) -> str:
    """A digest of a file of mutants, of what judges them, and of the kit."""
    sources = [path, *sorted(Path(judging.__file__).parent.glob("*.py")), *sorted(KIT.rglob("*.py"))]
    return hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]


def caught_of(path: Path, name: str, card: Scorecard) -> dict[str, list[str]]:
    """By law, the tests that have caught a mutant, without their parameters, in the order in which they ran.

    Raises:
        AssertionError: a control fails, or a test cannot run on this machine: it needs two hosts, or its
            preparation takes too long.
    """
    failures = judging.failures_of_controls(path, card)
    assert not failures, "; ".join(failures)
    mine = [result for result in card.results if result.suite == name]
    late = [each.test for each in mine if each.reason.startswith("no breach: in setup: Failed: Timeout")]
    assert not late, f"not prepared in time; perhaps the machine is busy: {', '.join(late)}"
    found = {}
    for law in judging.mutants(path)[name].breaks:
        catching = judging.catching(path, name, law, card)
        tests = dict.fromkeys(each.test.partition("[")[0] for each in mine if each.test in catching)
        assert tests or not (reason := judging.reason_without_hosts(name, card)), reason
        unrun = any(judging.NOT_RUN in each.reason and law in each.laws for each in mine)
        found[law] = [*tests, *[UNRUN] * (unrun and bool(tests))]
    return found


def judged(path: Path, name: str) -> dict[str, list[str]]:
    """Judge a mutant in a process of its own. Returns the tests that have caught it, by law.

    Raises:
        AssertionError, subprocess.TimeoutExpired: there is no result.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        names = [name, *judging.controls_of(path, name)]
        more = ("--every-test-to", LEVEL, "--basetemp", f"{folder}/t")
        card, _ = judging.judge(path, Path(folder), *names, more=more)
    return caught_of(path, name, card)


def judge_all(waiting: Mapping[str, tuple[Path, str]], results: Path, jobs: int) -> list[str]:
    """Judge the mutants, and store each result. Returns the mutants without one; prints why."""
    failed = []
    with ThreadPoolExecutor(jobs) as pool, results.open("a", encoding="utf-8") as file:
        began = {pool.submit(judged, *place): (mutant, place[0]) for mutant, place in waiting.items()}
        try:
            for number, each in enumerate(as_completed(began), 1):
                mutant, path = began[each]
                try:
                    caught = each.result()
                    line = {"mutant": mutant, "level": LEVEL, "stamp": stamp_of(path), "caught": caught}
                    print(json.dumps(line), file=file, flush=True)
                    outcome = "; ".join(
                        f"{law} by {len({*tests} - {UNRUN})}" for law, tests in caught.items()
                    )
                except (AssertionError, subprocess.TimeoutExpired) as e:
                    failed.append(mutant)
                    outcome = f"NO RESULT: {e}"
                print(f"[{number}/{len(began)}] {mutant}: {outcome}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return failed


# -- the command -----------------------------------------------------------------------------------


def named(names: Sequence[str]) -> dict[str, tuple[Path, str]]:
    """The mutants with these names or in these files, each with its file and class; without names, all."""
    return {
        f"{path.stem}.{name}": (path, name)
        for path in judging.FILES
        for name in judging.mutants(path)
        if not names or {path.stem, f"{path.stem}.{name}"} & {*names}
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument = parser.add_argument
    argument("results", type=Path, metavar="FILE", help="the results")
    argument("names", nargs="*", metavar="NAME", help="a file of mutants or a mutant; by default all")
    argument("--compare", action="store_true", help="judge nothing, and compare with the results in NAME")
    argument("--jobs", type=int, default=1, metavar="N", help="judge so many mutants at once (default 1)")
    given = parser.parse_args()
    before, failed = results_of(given.results), []
    if given.compare:
        after = results_of(Path(*given.names))
    else:
        if unknown := [name for name in given.names if not named([name])]:
            parser.error(f"no mutant is called {', '.join(unknown)}; an example of a name: {min(named([]))}")
        asked = named(given.names)
        waiting = {
            mutant: place
            for mutant, place in asked.items()
            if before.get(mutant, {}).get("stamp") != stamp_of(place[0])
        }
        print(f"{len(asked)} mutants, {len(waiting)} to judge", file=sys.stderr)
        failed = judge_all(waiting, given.results, given.jobs)
        before = {}
        after = {mutant: result for mutant, result in results_of(given.results).items() if mutant in asked}
    for line in differences(before, after):
        print(line)
    if failed:
        print(f"{len(failed)} mutants have no result: {', '.join(failed)}", file=sys.stderr)
    return 0 if all(rows_of(after).values()) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
