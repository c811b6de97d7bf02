"""Which tests of the conformance kit catch which mutant: a matrix, and what changed in it.

    python tests/lab/matrix.py                     # judge all mutants and write matrix.txt: hours
    python tests/lab/matrix.py stores pipes.TestX  # judge these, and replace their lines in matrix.txt
    python tests/lab/matrix.py stores --compare    # judge these, compare with matrix.txt, write nothing
    python tests/lab/matrix.py --compare OLD NEW   # judge nothing, compare two such files

Each mutant and its controls run in a process of their own: the tests of the laws that the mutant breaks, up
to the level, and tests of higher levels until one has caught it. The result of each mutant is stored in the
work file at once. A second start repeats a mutant only if it has no result at this level, or if its file or
the kit has changed; suites of other kinds do not count, and changes of the core do not either. To repeat all,
delete the work file.

A line of matrix.txt is a mutant, a law that it breaks, and the tests of the law that catch it, by the short
names at the end of the file. A line ends in "..." if tests did not run, because three others had hung.

Exit codes: 0; 1 if no test catches a mutant, or a mutant has no result; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import base64
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import attrs

import judging
import kvplug_testing
from kvplug_testing.scorecard import NOT_RUN, Scorecard, from_json

HERE: Final = Path(__file__).parent
MATRIX: Final = HERE / "matrix.txt"
WORK: Final = judging.ROOT / ".tox" / "mutants.jsonl"
KIT: Final = Path(kvplug_testing.__file__).parent
LEVELS: Final = ("quick", "full")
UNRUN: Final = "..."
"""Stands for the tests that did not run because others hung."""

Rows = dict[tuple[str, str], frozenset[str]]
"""The tests that catch a mutant, by its name (``"stores.TestX"``) and by the law that it breaks."""


class InputError(Exception):
    """An argument or a file is wrong."""


class NoResultError(Exception):
    """A mutant could not be judged."""


# -- the matrix as a file --------------------------------------------------------------------------


@attrs.frozen
class Matrix:
    """The rows of all mutants, and the level of their tests."""

    level: str
    rows: Rows

    def as_text(self) -> str:
        names = short_names({test for tests in self.rows.values() for test in tests} - {UNRUN})
        short = {test: name for name, test in names.items()} | {UNRUN: UNRUN}
        lines = [f"# level {self.level}; written by tests/lab/matrix.py"]
        for mutant, law in sorted(self.rows):
            tests = sorted(self.rows[mutant, law], key=lambda test: (test == UNRUN, short[test]))
            lines.append(" ".join([mutant, law, *(short[test] for test in tests)]))
        lines += ["# tests", *(f"{name} {test}" for name, test in sorted(names.items()))]
        return "\n".join(lines) + "\n"


def short_names(tests: Iterable[str]) -> dict[str, str]:
    """The tests by names of a few characters, which stay the same when tests come or go."""
    digests = {
        test: base64.b32encode(hashlib.sha256(test.encode()).digest()).decode().lower() for test in tests
    }
    length = 3
    while len({digest[:length] for digest in digests.values()}) < len(digests):
        length += 1
    return {digest[:length]: test for test, digest in digests.items()}


def read_matrix(path: Path) -> Matrix:
    """Raises:
    InputError: the file cannot be read, or is no matrix.
    """
    try:
        head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        level = head.removeprefix("# level ").partition(";")[0]
        at = lines.index("# tests")
        tests: dict[str, str] = {UNRUN: UNRUN, **dict(line.split(" ", 1) for line in lines[at + 1 :])}
        cells = [line.split(" ") for line in lines[:at]]
        rows = {(mutant, law): frozenset(tests[each] for each in short) for mutant, law, *short in cells}
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    except (ValueError, KeyError) as e:
        raise InputError(f"{path} is not a matrix of this program, or a part is missing: {e}") from e
    if level not in LEVELS:
        raise InputError(f"{path} is not a matrix of this program: it begins with {head[:60]!r}")
    return Matrix(level, rows)


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that it is never there in part."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def differences(old: Matrix, new: Matrix) -> Iterator[str]:
    """What tests no longer catch, in sentences. Mutants that are caught by no test come first."""
    counts = Counter((mutant.partition(".")[0], law) for (mutant, law), tests in new.rows.items() if tests)
    for key in sorted(new.rows):
        if not new.rows[key]:
            mutant, law = key
            others = counts[mutant.partition(".")[0], law]
            before = ", ".join(sorted(old.rows.get(key, ()))) or "no test"
            yield (
                f"{mutant} is caught by no test of {law}. Before: {before}."
                f" Other mutants of its file that tests of {law} catch: {others}"
            )
    for key in sorted(old.rows):
        mutant, law = key
        if key not in new.rows:
            yield f"{mutant} no longer exists, or no longer breaks {law}"
        elif new.rows[key] and (lost := old.rows[key] - new.rows[key] - {UNRUN}):
            left = len(new.rows[key] - {UNRUN})
            yield f"{mutant} is caught by {left} tests of {law}, no longer by {', '.join(sorted(lost))}"


# -- results of single mutants ---------------------------------------------------------------------


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


_BEGIN: Final = '{"mutant": "'
"""Of every line of a work file."""


class WorkFile:
    """The results so far, one JSON object a line; the last one of a mutant counts."""

    def __init__(self, path: Path) -> None:
        """Raises:
        InputError: the file is not a work file, or cannot be opened.
        """
        self.path = path
        self._results: dict[str, Mapping[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            for number, line in enumerate(text.split("\n"), 1):
                self._note(number, line)
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" if text and not text.endswith("\n") else "")
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"--work {path}: {e}") from e

    def _note(self, number: int, line: str) -> None:
        try:
            result = json.loads(line)
            self._results[result["mutant"]] = result
        except (ValueError, TypeError, KeyError) as e:
            if not _BEGIN.startswith(line[: len(_BEGIN)]):  # else a program was killed while it wrote
                raise InputError(f"--work {self.path}: line {number} is not a result of this program") from e

    def add(self, **result: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self._results[result["mutant"]] = result

    def caught(self, mutant: str, stamp: str, level: str) -> Mapping[str, list[str]] | None:
        """By law, the tests that catch a mutant; None without a result that still holds."""
        result = self._results.get(mutant, {})
        holds = (result.get("stamp"), result.get("level")) == (stamp, level)
        return result.get("caught") if holds else None


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
            NoResultError: the process has written no report, or judged something that has changed since.
        """
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
    chosen: Sequence[tuple[Path, str]], work: WorkFile, *, level: str, jobs: int, deadline_s: float
) -> None:
    """Judge the mutants, and store each result; print why there is none."""
    waiting, running, done = list(chosen[::-1]), list[Judging](), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Judging(*waiting.pop(), level))
            time.sleep(0.1)
            for each in list(running):
                over = each.took_s > deadline_s
                if each.process.poll() is None and not over:
                    continue
                mutant, done = f"{each.path.stem}.{each.name}", done + 1
                about = f"[{done}/{len(chosen)}] {mutant}, {each.took_s:.0f} s:"
                try:
                    if over:
                        raise NoResultError(f"it was not judged within {deadline_s:.0f} s (--deadline)")
                    caught = each.caught()
                    work.add(
                        mutant=mutant,
                        level=level,
                        stamp=each.stamp,
                        seconds=round(each.took_s),
                        caught=caught,
                    )
                    said = "; ".join(f"{law} by {len({*tests} - {UNRUN})}" for law, tests in caught.items())
                    print(about, said, file=sys.stderr, flush=True)
                except NoResultError as e:
                    print(about, f"NO RESULT: {e}", file=sys.stderr, flush=True)
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
    number("names", nargs="*", metavar="NAME", help="a file of mutants or a mutant; by default all")
    number("--level", choices=LEVELS, default=LEVELS[0], help="of the tests that all run (default quick)")
    number("--jobs", type=int, default=1, metavar="N", help="judge so many mutants at once (default 1)")
    number("--deadline", type=float, default=900.0, metavar="S", help="seconds for a mutant (default 900)")
    number(
        "--work", type=Path, default=WORK, metavar="FILE", help="the work file (default .tox/mutants.jsonl)"
    )
    number("--output", type=Path, default=MATRIX, metavar="FILE", help="the matrix (default matrix.txt)")
    number(
        "--compare",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="compare OLD NEW, or the results with --output",
    )
    given = parser.parse_args(arguments)
    if given.compare is not None and len(given.compare) not in (0, 2):
        parser.error("--compare takes two files, OLD and NEW, or none: then write it after the NAMEs")
    if given.compare and given.names:
        parser.error("--compare OLD NEW judges nothing, so it takes no NAME")
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
        if given.compare:
            old, new = map(read_matrix, given.compare)
            return told(old, new)
        return run(given, files)
    except InputError as e:
        print(f"matrix.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("matrix.py: interrupted; the same command resumes", file=sys.stderr)
        return 130


def run(given: argparse.Namespace, files: Sequence[Path]) -> int:
    mutants = named(given.names, files)
    written = None
    if given.compare is not None or (given.names and given.output.exists()):
        written = read_matrix(given.output)  # before hours of work
        if written.level != given.level:
            raise InputError(f"{given.output} is of level {written.level}: add --level {written.level}")
    if given.compare is None and not os.access(given.output.absolute().parent, os.W_OK):
        raise InputError(f"--output {given.output}: its folder does not exist, or cannot be written to")
    work = WorkFile(given.work)
    stamps = {mutant: stamp_of(*place) for mutant, place in mutants.items()}

    def without_result() -> list[str]:
        return [each for each in mutants if work.caught(each, stamps[each], given.level) is None]

    waiting = without_result()
    print(f"{len(mutants)} mutants, {len(waiting)} to judge; results in {given.work}", file=sys.stderr)
    with terminated_as_interrupted():
        places = [mutants[each] for each in waiting]
        judge_all(places, work, level=given.level, jobs=given.jobs, deadline_s=given.deadline)
    if failed := without_result():
        print(f"no matrix: {len(failed)} mutants have no result: {', '.join(failed)}", file=sys.stderr)
        return 1
    rows: Rows = {
        (mutant, law): frozenset(tests)
        for mutant, stamp in stamps.items()
        for law, tests in (work.caught(mutant, stamp, given.level) or {}).items()
    }
    if given.compare is not None:
        assert written is not None
        old = {key: tests for key, tests in written.rows.items() if not given.names or key[0] in mutants}
        return told(Matrix(given.level, old), Matrix(given.level, rows))
    if written is not None:
        others = named((), files).keys() - mutants.keys()
        rows |= {key: tests for key, tests in written.rows.items() if key[0] in others}
    write_whole(given.output, Matrix(given.level, rows).as_text())
    print(f"{given.output}: {len(rows)} lines", file=sys.stderr)
    return told(Matrix(given.level, {}), Matrix(given.level, rows))


def told(old: Matrix, new: Matrix) -> int:
    """Print the differences. Returns the exit code."""
    if old.level != new.level:
        raise InputError(f"one matrix is of level {old.level}, the other of level {new.level}")
    for line in differences(old, new):
        print(line)
    return 0 if all(new.rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
