"""Which tests of the conformance kit catch which mutant, and what has changed in that.

    python tests/lab/matrix.py before.jsonl                     # judge all mutants: hours
    python tests/lab/matrix.py before.jsonl stores pipes.TestX  # judge these: a file of mutants, and one
    python tests/lab/matrix.py --compare before.jsonl after.jsonl

Each mutant and its controls run in a process of their own: the tests of the laws that the mutant breaks, up
to the level, and tests of higher levels until one has caught it. The result of each mutant is added to the
file at once, as a line; the last line of a mutant counts. A second start judges a mutant only if it has no
result at this level, or if its file or the kit has changed; suites of other kinds do not count, and changes
of the core do not either. Tests that did not run, because three others had hung, are listed as "...".

Exit codes: 0; 1 if no test catches a mutant, or a mutant has no result; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import judging
import kvplug_testing
from kvplug_testing.scorecard import NOT_RUN, Scorecard, from_json

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


@cache
def _digest(path: Path, mtime_ns: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def stamp_of(path: Path, name: str) -> str:
    """A digest of the mutant's file and of the kit without the suites of other kinds."""
    bases = judging.mutants(path)[name].__mro__
    mine = {
        Path(inspect.getfile(cls)).parent for cls in bases if cls.__module__.startswith("kvplug_testing.")
    }
    suites = KIT / "contract"  # in folders, by kind
    kit = [each for each in sorted(KIT.rglob("*.py")) if each.parent.parent != suites or each.parent in mine]
    digests = [_digest(each, each.stat().st_mtime_ns) for each in (path, path.with_name("conftest.py"), *kit)]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


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
        unrun = any(NOT_RUN in each.reason and law in each.laws for each in mine)
        found[law] = sorted(tests) + [UNRUN] * (unrun and bool(tests))
    return found


# -- the run ---------------------------------------------------------------------------------------


class Judging:
    """A process that judges a mutant."""

    def __init__(self, path: Path, name: str, level: str) -> None:
        self.path, self.name = path, name
        self.stamp = stamp_of(path, name)
        self.began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
        self._report = Path(self._folder.name) / "report.json"
        self._output = Path(self._folder.name) / "output"
        names = [name, *judging.controls_of(path, name)]
        more = ("--every-test-to", level, "--basetemp", f"{self._folder.name}/t")
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                judging.command(path, self._report, *names, more=more),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,
                env=judging.environment(),
                start_new_session=True,
            )

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.began

    def caught(self) -> dict[str, list[str]]:
        """By law, the tests that have caught the mutant.

        Raises:
            NoResultError: the process still runs, has written no report, or judged what has changed since.
        """
        if self.process.poll() is None:
            raise NoResultError("it was not judged in time (--deadline)")
        if not self._report.exists() or self.process.returncode not in (0, 1):
            end = "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])
            raise NoResultError(f"exit code {self.process.returncode}, and this output:\n{end}")
        if stamp_of(self.path, self.name) != self.stamp:
            raise NoResultError("its file or the kit has changed meanwhile")
        return caught_of(self.path, self.name, from_json(self._report.read_text()))

    def end(self) -> None:
        """Kill the process and its children, and delete what it has written."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._folder.cleanup()


def judge_all(
    chosen: Sequence[tuple[Path, str]], results: Results, *, level: str, jobs: int, deadline_s: float
) -> None:
    """Judge the mutants, and store each result; print why there is none."""
    waiting, running, done = list(chosen[::-1]), list[Judging](), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Judging(*waiting.pop(), level))
            time.sleep(0.1)
            for each in list(running):
                if each.process.poll() is None and each.took_s <= deadline_s:
                    continue
                mutant, done = f"{each.path.stem}.{each.name}", done + 1
                about = f"[{done}/{len(chosen)}] {mutant}, {each.took_s:.0f} s:"
                try:
                    caught = each.caught()
                    results.add(mutant=mutant, level=level, stamp=each.stamp, caught=caught)
                    said = "; ".join(f"{law} by {len({*tests} - {UNRUN})}" for law, tests in caught.items())
                except NoResultError as e:
                    said = f"NO RESULT: {e}"
                print(about, said, file=sys.stderr, flush=True)
                running.remove(each)
                each.end()
    finally:
        for each in running:
            each.end()


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


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end this program as an interrupt does, so that its children end, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None, files: Sequence[Path] = judging.FILES) -> int:
    given = options(arguments)
    try:
        results = Results(given.results)
        if not given.compare:
            return judged(given, results, files)
        new = Results(Path(given.names[0])).rows(given.level)
        for line in differences(results.rows(given.level), new):
            print(line)
        return 0 if all(new.values()) else 1
    except InputError as e:
        print(f"matrix.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("matrix.py: interrupted; the same command resumes", file=sys.stderr)
        return 130


def judged(given: argparse.Namespace, results: Results, files: Sequence[Path]) -> int:
    """Judge the mutants without a result. Returns the exit code."""
    mutants = named(given.names, files)
    stamps = {mutant: stamp_of(*place) for mutant, place in mutants.items()}

    def without_result() -> list[str]:
        return [each for each in mutants if not results.has(each, stamps[each], given.level)]

    waiting = without_result()
    print(f"{len(mutants)} mutants, {len(waiting)} to judge", file=sys.stderr)
    with terminated_as_interrupted():
        places = [mutants[each] for each in waiting]
        judge_all(places, results, level=given.level, jobs=given.jobs, deadline_s=given.deadline)
    failed = without_result()
    if failed:
        print(f"{len(failed)} mutants have no result: {', '.join(failed)}", file=sys.stderr)
    rows = {key: tests for key, tests in results.rows(given.level).items() if key[0] in mutants}
    for line in differences({}, rows):
        print(line)
    return 0 if all(rows.values()) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
