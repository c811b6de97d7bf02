"""Which tests of the conformance kit catch which mutant, and what has changed in that.

    python tests/lab/matrix.py before.jsonl                     # judge all mutants: hours
    python tests/lab/matrix.py before.jsonl stores pipes.TestX  # judge these: a file of mutants, and one
    python tests/lab/matrix.py --compare before.jsonl after.jsonl

Each mutant and its controls run in a process of their own: the tests of the laws that the mutant breaks, up
to the level, and tests of higher levels until one has caught it. The result of each mutant is added to the
file at once, as a line; the last line of a mutant counts. A second start judges a mutant only if it has no
result at this level, or if its file or the kit has changed; changes of the core do not count. Tests that did
not run, because three others had hung, are listed as "...".

Exit codes: 0; 1 if no test catches a mutant, or a mutant has no result; 2 for wrong arguments; 130 if SIGINT
or SIGTERM ended it, and it its processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import judging
import kvplug_testing
from kvplug_testing.scorecard import Scorecard, from_json

KIT: Final = Path(kvplug_testing.__file__).parent
LEVELS: Final = ("quick", "long")
UNRUN: Final = "..."

Rows = Mapping[tuple[str, str], frozenset[str]]
"""The tests that catch a mutant, by its name (``"stores.TestX"``) and by the law that it breaks."""


class InputError(Exception):
    """An argument or a file is wrong."""


class NoResultError(Exception):
    """A mutant could not be judged."""


# -- results ---------------------------------------------------------------------------------------

_BEGIN: Final = '{"mutant": "'
"""Of every line of a file of results."""


class Results:
    """A file of results, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        """Raises:
        InputError: it is not such a file, or cannot be opened.
        """
        self.path = path
        self._results: dict[str, Mapping[str, Any]] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            for number, line in enumerate(text.split("\n"), 1):
                self._note(number, line)
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" if text and not text.endswith("\n") else "")
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"{path}: {e}") from e

    def _note(self, number: int, line: str) -> None:
        try:
            result = json.loads(line)
            self._results[result["mutant"]] = result
        except (ValueError, TypeError, KeyError) as e:
            if not _BEGIN.startswith(line[: len(_BEGIN)]):  # else a program was killed while it wrote
                raise InputError(f"{self.path}: line {number} is not a result of this program") from e

    def add(self, **result: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self._results[result["mutant"]] = result

    def has(self, mutant: str, stamp: str, level: str) -> bool:
        """Whether a mutant has a result that still holds."""
        result = self._results.get(mutant, {})
        return (result.get("stamp"), result.get("level")) == (stamp, level)

    def rows(self, level: str) -> Rows:
        return {
            (mutant, law): frozenset(tests)
            for mutant, result in self._results.items()
            if result["level"] == level
            for law, tests in result["caught"].items()
        }


def differences(old: Rows, new: Rows) -> Iterator[str]:
    """What tests no longer catch, in sentences. Mutants that are caught by no test come first."""
    counts = Counter((mutant.partition(".")[0], law) for (mutant, law), tests in new.items() if tests)
    for mutant, law in sorted(key for key, tests in new.items() if not tests):
        others = counts[mutant.partition(".")[0], law]
        before = ", ".join(sorted(old.get((mutant, law), ()))) or "no test"
        yield (
            f"{mutant} is caught by no test of {law}. Before: {before}."
            f" Other mutants of its file that tests of {law} catch: {others}"
        )
    for mutant, law in sorted(old):
        now = new.get((mutant, law))
        if now is None:
            yield f"{mutant} no longer exists, or no longer breaks {law}"
        elif now and (lost := old[mutant, law] - now - {UNRUN}):
            left = len(now - {UNRUN})
            yield f"{mutant} is caught by {left} tests of {law}, no longer by {', '.join(sorted(lost))}"


def stamp_of(path: Path) -> str:
    """A digest of a file of mutants, of what judges them, and of the kit."""
    sources = [path, *sorted(Path(judging.__file__).parent.glob("*.py")), *sorted(KIT.rglob("*.py"))]
    return hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]


def caught_of(path: Path, name: str, card: Scorecard) -> dict[str, list[str]]:
    """By law, the tests that have caught a mutant, without their parameters.

    Raises:
        NoResultError: it has no control, or a control fails, or a test cannot run on this machine: it needs
            two hosts, or its preparation takes too long.
    """
    if not judging.controls_of(path, name):
        raise NoResultError("no control has a base class of it")
    if failures := judging.failures_of_controls(path, card):
        raise NoResultError("; ".join(failures))
    mine = [result for result in card.results if result.suite == name]
    for each in mine:
        if each.reason.startswith("no breach: in setup: Failed: Timeout"):
            raise NoResultError(f"{each.test} was not prepared in time; perhaps the machine is busy")
    found = {}
    for law in judging.mutants(path)[name].breaks:
        tests = {test.partition("[")[0] for test in judging.catching(path, name, law, card)}
        if not tests and (reason := judging.reason_without_hosts(name, card)):
            raise NoResultError(reason)
        unrun = any(judging.NOT_RUN in each.reason and law in each.laws for each in mine)
        found[law] = sorted(tests) + [UNRUN] * (unrun and bool(tests))
    return found


# -- the run ---------------------------------------------------------------------------------------


_running: Final[set[subprocess.Popen[str]]] = set()
"""Processes that judge a mutant."""


def judged(path: Path, name: str, level: str, deadline_s: float) -> dict[str, list[str]]:
    """Judge a mutant in a process of its own. Returns the tests that have caught it, by law.

    Raises:
        NoResultError: why there is no result.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "report.json"
        names = [name, *judging.controls_of(path, name)]
        more = ("--every-test-to", level, "--basetemp", f"{folder}/t")
        with subprocess.Popen(
            judging.command(path, report, *names, more=more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=folder,
            env=judging.environment(),
        ) as process:
            _running.add(process)
            try:
                output, _ = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise NoResultError("it was not judged in time (--deadline)") from None
            finally:
                _running.discard(process)
        if not report.exists() or process.returncode not in (0, 1):
            end = "\n".join(output.splitlines()[-15:])
            raise NoResultError(f"exit code {process.returncode}, and this output:\n{end}")
        return caught_of(path, name, from_json(report.read_text()))


def judge_all(
    places: Mapping[str, tuple[Path, str]], results: Results, *, level: str, jobs: int, deadline_s: float
) -> list[str]:
    """Judge the mutants, and store each result. Returns the mutants without one; prints why."""
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        began = {
            pool.submit(judged, path, name, level, deadline_s): (mutant, stamp_of(path))
            for mutant, (path, name) in places.items()
        }
        try:
            for number, each in enumerate(as_completed(began), 1):
                mutant, stamp = began[each]
                try:
                    caught = each.result()
                    results.add(mutant=mutant, level=level, stamp=stamp, caught=caught)
                    said = "; ".join(f"{law} by {len({*tests} - {UNRUN})}" for law, tests in caught.items())
                except NoResultError as e:
                    failed.append(mutant)
                    said = f"NO RESULT: {e}"
                print(f"[{number}/{len(began)}] {mutant}: {said}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.kill()
    return failed


# -- the command -----------------------------------------------------------------------------------


def named(names: Sequence[str], files: Sequence[Path]) -> dict[str, tuple[Path, str]]:
    """The mutants with these names, each with its file and class; without names, all.

    Raises:
        InputError: there is no such mutant.
    """
    every = {f"{path.stem}.{name}": (path, name) for path in files for name in judging.mutants(path)}
    chosen: dict[str, tuple[Path, str]] = {}
    for name in names:
        found = {each: place for each, place in every.items() if name in (each, place[0].stem)}
        if not found:
            stems = ", ".join(path.stem for path in files)
            raise InputError(f"no mutant is called {name}: name a file ({stems}) or one such as {min(every)}")
        chosen |= found
    return chosen if names else every


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = parser.add_argument
    number("results", type=Path, metavar="FILE", help="the results")
    number("names", nargs="*", metavar="NAME", help="a file of mutants or a mutant; by default all")
    number("--compare", action="store_true", help="judge nothing, and compare with the results in NAME")
    number("--level", choices=LEVELS, default=LEVELS[0], help="of the tests that all run (default quick)")
    number("--jobs", type=int, default=1, metavar="N", help="judge so many mutants at once (default 1)")
    number("--deadline", type=float, default=900.0, metavar="S", help="seconds for a mutant (default 900)")
    given = parser.parse_args(arguments)
    if given.compare and len(given.names) != 1:
        parser.error("--compare takes two files of results")
    if given.jobs < 1 or not given.deadline > 0:
        parser.error("--jobs and --deadline are at least 1")
    return given


def main(arguments: Sequence[str] | None = None, files: Sequence[Path] = judging.FILES) -> int:
    given = options(arguments)
    try:
        results = Results(given.results)
        if given.compare:
            new = Results(Path(given.names[0])).rows(given.level)
            old, failed = results.rows(given.level), []
        else:
            mutants = named(given.names, files)
            waiting = {
                each: place
                for each, place in mutants.items()
                if not results.has(each, stamp_of(place[0]), given.level)
            }
            print(f"{len(mutants)} mutants, {len(waiting)} to judge", file=sys.stderr)
            failed = judge_all(
                waiting, results, level=given.level, jobs=given.jobs, deadline_s=given.deadline
            )
            new = {key: tests for key, tests in results.rows(given.level).items() if key[0] in mutants}
            old = {}
    except InputError as e:
        print(f"matrix.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("matrix.py: interrupted; the same command resumes", file=sys.stderr)
        return 130
    for line in differences(old, new):
        print(line)
    if failed:
        print(f"{len(failed)} mutants have no result: {', '.join(failed)}", file=sys.stderr)
    return 0 if all(new.values()) and not failed else 1


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores SIGINT
        signal.signal(each, signal.default_int_handler)
    sys.exit(main())
