"""The compiled steps do what those in Python do: the same bytes and words, whatever the other end says."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import runpy
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ring_library
import shm_pipe_ends as ends_of_pipes
from kvplug.transport import Segment, WireError
from kvplug_shm.memory.words import Words
from kvplug_shm.native import library as native
from kvplug_shm.native.ends import (
    NativeReadingEnd,
    NativeWritingEnd,
    reading_end,
    writing_end,
)
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import LINE, Pieces, lines, segment_size
from kvplug_shm.pipe.header import Header
from kvplug_shm.pipe.native import NativeIncoming, NativeOutgoing, incoming, outgoing
from kvplug_shm.ring import protocol
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd
from kvplug_testing.waits import Call

by_hand, local_pair = ends_of_pipes.by_hand, ends_of_pipes.local_pair
STEPS: Any = native.library()
compiled = pytest.mark.skipif(STEPS is None, reason="this installation has no compiled steps")
has_compiler = pytest.mark.skipif(ring_library.compiler() is None, reason="there is no compiler")
RING = 1024
MIB = 1 << 20
PIECES = Pieces(at_once=500, smallest=2 * LINE, largest=4 * LINE)


def segment(nbytes: int = segment_size(RING)) -> Segment:
    made, fd = Segment.create("test", nbytes)
    os.close(fd)
    return made


# -- the library ---------------------------------------------------------------------------------------


def library_in(folder: Path) -> Any:
    """What a package with the ``_ring.so`` and ``ring.c`` of this folder uses as its compiled steps."""
    copy = shutil.copy(native.__file__, folder)
    spec = importlib.util.spec_from_file_location("kvplug_shm.native.library_of_a_test", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.library()


@has_compiler
def test_what_is_compiled_is_there_where_a_compiler_is() -> None:
    assert STEPS is not None, "every other test here is skipped: install kvplug-shm again"


@has_compiler
def test_the_source_gives_no_warning_and_another_one_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring_library.build(tmp_path, flags=["-Wall", "-Wextra", "-Wshadow", "-Werror"])
    assert library_in(tmp_path) is not None
    (tmp_path / "ring.c").write_text("another")
    assert library_in(tmp_path) is None
    assert "another ring.c" in caplog.text


@pytest.mark.parametrize("content", [b"no library", None])
def test_a_library_that_cannot_be_used_is_logged_and_done_without(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "_ring.so").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert library_in(tmp_path) is None
    assert ("using Python instead" in caplog.text) is (content is not None)


@pytest.mark.parametrize("compiler", ["true", "false", "no-such-compiler"])
def test_a_wheel_has_them_where_a_compiler_succeeds(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hatchling")
    root, warnings = Path(__file__).parents[1], list[str]()
    config = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["hooks"]["custom"]
    hook = runpy.run_path(str(root / "hatch_build.py"))["CompiledSteps"]
    app = SimpleNamespace(display_warning=warnings.append)
    build, data = hook(str(root), config, None, None, "", "wheel", app), {"force_include": {}}
    monkeypatch.setenv("CC", compiler)
    build.initialize("standard", data)
    build.finalize("standard", data, "")
    compiles = compiler == "true"
    assert ("tag" in data, len(data["force_include"]), len(warnings)) == (compiles, compiles, not compiles)


# -- the same as in Python -----------------------------------------------------------------------------

WORD = st.one_of(
    st.integers(0, 40),
    st.sampled_from([2**64 - 1, 2**64 - 2, 2**63, 2**63 - 1, 2**32]),
)


class Ring:
    """One ring in memory of its own, its ends in Python or compiled."""

    def __init__(self, compiled: bool, memory: Any = None) -> None:
        steps = STEPS if compiled else None
        self.memory = memory or segment()
        self.out: Any = outgoing(self.memory, 0, RING, steps, 0.0)
        self.into: Any = incoming(self.memory, 0, RING, steps, 0.0)
        self.words = self.out.words.words

    def put(self, nbytes: int, limit: int, pieces: Pieces = PIECES) -> Any:
        data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        return self.out.put(Header(b"p" * LINE, nbytes), data.data_ptr(), pieces, limit)

    def take(self, nbytes: int) -> Any:
        here, line = self.into.next_line()
        if here < LINE + lines(nbytes):
            return here
        target = torch.zeros(nbytes, dtype=torch.uint8)
        self.into.take(target.data_ptr(), nbytes)
        return line, target.tolist()

    def say(self, word: int, value: int) -> None:
        self.words[word] = value

    def step(self, what: str, *args: int) -> Any:
        """What comes of it: a result or an error, and all of the memory."""
        try:
            result = getattr(self, what)(*args)
        except WireError as e:
            result = str(e)
        return result, self.out.end.sent, self.into.end.read, bytes(self.memory.view)


RING_STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 500), st.integers(0, 2 * RING)),
    st.tuples(st.just("take"), st.integers(0, 500)),
    st.tuples(st.just("say"), st.integers(0, protocol.num_words(1) - 1), WORD),
)


@compiled
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(RING_STEPS, max_size=12))
def test_whatever_is_put_taken_and_said_both_leave_the_same(steps: list[tuple[Any, ...]]) -> None:
    python, compiled = Ring(False), Ring(True)
    for step in steps:
        assert compiled.step(*step) == python.step(*step)


@compiled
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(WORD, min_size=8, max_size=8), st.integers(0, 20), st.integers(1, 9))
def test_both_agree_on_what_is_blocked_on(values: list[int], at: int, count: int) -> None:
    words = Words(segment(4096), 0, protocol.num_words(2))
    for index, value in enumerate(values):
        words.words[index] = value
    for reader in (0, 1):
        ends = ReadingEnd(words, reader, 8, read=at), NativeReadingEnd(STEPS, words, reader, 8, read=at)
        assert len({end.spin(count, 0.0) for end in ends}) == 1
        assert len({end.poll(count, 0.0, 0.0) for end in ends}) == 1
    native_end = NativeWritingEnd(STEPS, words, 2, 8, sent=at)
    try:
        room = WritingEnd(words, 2, 8, sent=at).room()
    except WireError:
        room = count  # do not wait: the next access raises the error
    assert native_end.spin(count, 0.0) == (room >= count)


@compiled
@given(st.integers(0, RING // LINE), st.integers(101, RING // 2), st.integers(0, 2 * RING))
def test_what_is_put_in_pieces_lies_there_as_what_is_put_at_once(shift: int, nbytes: int, limit: int) -> None:
    left = []
    for at_once in (100, RING):
        ring = Ring(True)
        ring.out.end.publish(shift * LINE)
        ring.into.end.release(max(0, shift - 3) * LINE)
        done = ring.put(nbytes, limit, Pieces(at_once=at_once, smallest=LINE, largest=2 * LINE))
        left.append((done, ring.out.end.sent, bytes(ring.memory.view)))
    assert left[0] == left[1]


# -- words that cannot be true -------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("word", [2**64 - 2, 2 * (RING + 1), 2**63, None])
def test_for_an_end_that_was_given_up_or_says_what_cannot_be_nothing_is_moved(word: int | None) -> None:
    ring = Ring(True)
    data = torch.ones(600, dtype=torch.uint8)
    span = Span.flat(data.data_ptr())
    if word is None:
        ring.out.end.evict(0)
    else:
        ring.say(protocol.tail(0), word)
        ring.say(protocol.HEAD, word)
    before = bytes(ring.memory.view)
    assert ring.out.push(b"p" * LINE, span, 0, 600, PIECES, patient=True) == 0
    assert bytes(ring.memory.view) == before
    if word is not None and word < 2**63:
        assert ring.into.pull(span, 0, 600, 0, LINE, patient=True) == 0
        with pytest.raises(WireError):
            ring.into.next_line()


def shown_and_withdrawn(what: str) -> ring_library.Change:
    """In the C function that spins for this: the other end shows it now, and has withdrawn it afterwards."""
    head = f"int kvplug_spin_for_{what}(const struct end *"
    stand_in = f"{head}e, int64_t c, int64_t s) {{ (void)e, (void)c, (void)s; return 1; }}"
    return f"{head}end", f"{stand_in}\nint really_spin_for_{what}(const struct end *end"


@pytest.fixture(scope="module")
def steps_that_are_misled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("misled")
    ring_library.build(folder, *map(shown_and_withdrawn, ("room", "units")))
    return library_in(folder)


@has_compiler
@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("what", ["room", "units"])
def test_an_end_that_shows_and_withdraws_holds_no_call(
    steps_that_are_misled: Any, what: str, patient: bool
) -> None:
    memory = segment()
    out = NativeOutgoing(steps_that_are_misled, memory, 0, RING, 1.0)
    into = NativeIncoming(steps_that_are_misled, memory, 0, RING, 1.0)
    data = torch.zeros(MIB, dtype=torch.uint8)  # large, so that the call lets other threads run
    span = Span.flat(data.data_ptr())
    if what == "room":
        out.end.publish(RING)
        moves = Call(lambda: out.push(b"", span, 0, MIB, PIECES, patient=patient))
    else:
        moves = Call(lambda: into.pull(span, 0, MIB, 0, LINE, patient=patient))
    try:
        assert moves.result(10) == 0
    finally:  # the thread must not run on
        out.end.publish(RING) if what == "units" else into.end.release(RING)
        moves.end()


@compiled
def test_an_end_whose_memory_was_released_raises() -> None:
    words = Words(segment(4096), 0, protocol.num_words(1))
    ends = writing_end(words, 1, 8, native=True), reading_end(words, 0, 8, native=True)
    words.words.release()
    spins = [functools.partial(end.spin, 1, 0.0) for end in ends]
    for call in (ends[0].publish, ends[1].release, *spins, functools.partial(ends[1].poll, 1, 0.0, 0.0)):
        with pytest.raises(ValueError, match="released"):
            call()
