"""The compiled steps: they are required, move bytes whole, and are not misled by other ends."""

from __future__ import annotations

import ctypes
import importlib.util
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
from kvplug import TransportError
from kvplug.transport import Segment, WireError
from kvplug_shm import probe
from kvplug_shm.memory.words import Words
from kvplug_shm.native import library as native
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import LINE, SMALLEST_COST, RingSizes, lines
from kvplug_shm.pipe.message import Header
from kvplug_shm.pipe.rings import Incoming, Outgoing
from kvplug_shm.ring import protocol
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd
from kvplug_testing.waits import Call

has_compiler = pytest.mark.skipif(ring_library.compiler() is None, reason="there is no compiler")
RING = 1024
MIB = 1 << 20
SIZES = RingSizes(RING, RING, at_once=500, smallest=2 * LINE, largest=4 * LINE)


def segment(nbytes: int = SIZES.segment_nbytes) -> Segment:
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
def test_the_source_gives_no_warning_and_another_one_is_not_used(tmp_path: Path) -> None:
    ring_library.build(tmp_path, flags=["-Wall", "-Wextra", "-Wshadow", "-Werror"])
    assert library_in(tmp_path) is not None
    (tmp_path / "ring.c").write_text("another")
    with pytest.raises(TransportError, match="built from another ring"):
        library_in(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"), [(b"no library", "cannot be loaded"), (None, "need compiled code")]
)
def test_without_a_library_that_can_be_used_the_plugin_says_why_it_is_not_viable(
    content: bytes | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "_ring.so").write_bytes(content)
    monkeypatch.setattr(probe, "library", lambda: library_in(tmp_path))
    found = probe.describe()
    assert not found.viable and why in found.reason


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


# -- messages ------------------------------------------------------------------------------------------


class Ring:
    """Both ends of one ring, in memory of its own."""

    def __init__(self, sizes: RingSizes = SIZES) -> None:
        self.memory = segment(sizes.segment_nbytes)
        self.out, self.into = Outgoing(self.memory, 0, sizes), Incoming(self.memory, 0, sizes)

    def put(self, data: torch.Tensor, limit: int) -> bool:
        return self.out.put(Header(b"p" * LINE, len(data)), data.data_ptr(), limit)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """The bytes of the next message, if it has come."""
        here, line = self.into.next_line()
        if here < LINE + lines(nbytes):
            return None
        assert line == b"p" * LINE
        target = torch.zeros(nbytes, dtype=torch.uint8)
        self.into.take(target.data_ptr(), nbytes)
        return target


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 500), st.integers(0, 2 * RING)), max_size=15))
def test_what_there_is_room_for_is_put_and_taken_whole_and_in_order(
    steps: list[tuple[bool, int, int]],
) -> None:
    ring, unread = Ring(), list[torch.Tensor]()
    for number, (puts, nbytes, limit) in enumerate(steps):
        held = sum(LINE + lines(len(each)) for each in unread)
        if puts:
            data = (torch.arange(nbytes) * 7 + number).to(torch.uint8)
            fits = LINE + lines(nbytes) <= RING - held
            within = held + max(SMALLEST_COST, nbytes) <= limit or not held
            assert ring.put(data, limit) == (fits and within)
            if fits and within:
                unread.append(data)
        elif unread:
            first = unread.pop(0)
            got = ring.take(len(first))
            assert got is not None and torch.equal(got, first)
        else:
            assert ring.take(0) is None


@given(st.integers(0, RING // LINE), st.integers(101, RING // 2), st.integers(0, 2 * RING))
def test_what_is_put_in_pieces_lies_there_as_what_is_put_at_once(shift: int, nbytes: int, limit: int) -> None:
    left = []
    for at_once in (100, RING):
        ring = Ring(RingSizes(RING, RING, at_once=at_once, smallest=LINE, largest=2 * LINE))
        ring.out.end.publish(shift * LINE)
        ring.into.end.release(max(0, shift - 3) * LINE)
        data = torch.arange(nbytes).to(torch.uint8)
        done = ring.put(data, limit)
        left.append((done, ring.out.end.sent, bytes(ring.memory.view)))
    assert left[0] == left[1]


# -- the window ----------------------------------------------------------------------------------------

WINDOW = RingSizes(8 * RING, RING, at_once=500, smallest=2 * LINE, largest=4 * LINE)


def last_written(ring: Ring) -> int:
    return max((at for at, byte in enumerate(ring.out.bytes) if byte), default=0)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * RING), st.integers(LINE, 4 * RING)), max_size=15))
def test_a_window_confines_what_is_written_and_all_of_it_arrives(
    messages: list[tuple[int, int]],
) -> None:
    ring = Ring(WINDOW)
    for number, (nbytes, window) in enumerate(messages):
        ring.out.end.state.window = max(2, window // LINE) * LINE  # as when it grew, or shrank
        data = (torch.arange(nbytes) * 7 + number).to(torch.uint8)
        prefix, sent, got = b"p" * LINE, 0, 0
        if ring.put(data, 10 * RING):
            prefix, sent = b"", nbytes
        target, unreleased = torch.zeros_like(data), LINE
        while got < nbytes:
            before = ring.out.end.sent
            sent += ring.out.push(prefix, Span.flat(data.data_ptr()), sent, nbytes, patient=False)
            prefix = prefix if ring.out.end.sent == before else b""
            for unread in (0, LINE, nbytes):
                enough = ring.out.end.poll(ring.out.room_with(unread))
                assert enough == (ring.out.unread() <= unread)
            if unreleased and not got:
                assert ring.into.next_line() == (ring.into.next_line()[0], b"p" * LINE)
            if step := ring.into.pull(Span.flat(target.data_ptr()), got, nbytes, unreleased, patient=False):
                unreleased, got = 0, got + step
        assert torch.equal(data, target)
        assert ring.out.unread() == 0
    assert last_written(ring) < 4 * RING + 500 + LINE


@pytest.mark.parametrize("copying", [True, False])
def test_a_window_grows_to_the_whole_ring_while_a_reader_that_copies_does_not_run(copying: bool) -> None:
    ring = Ring(WINDOW)
    out = Outgoing(ring.memory, 0, WINDOW, 0.001)
    hint = ctypes.c_uint32.from_address(out.words.address + Words.size(protocol.tail(0)) + 8)
    hint.value = copying
    data = torch.ones(2 * MIB, dtype=torch.uint8)
    span, sent = Span.flat(data.data_ptr()), 0
    for _ in range(8):  # each call ends after some milliseconds, and each wait doubles the window
        sent += out.push(b"", span, sent, len(data), patient=True)
    assert sent == out.unread() == (WINDOW.nbytes if copying else WINDOW.window)
    assert last_written(ring) == sent - 1
    del hint


def test_a_window_shrinks_again_while_the_reader_keeps_pace() -> None:
    ring, data = Ring(WINDOW), torch.zeros(RING // 4, dtype=torch.uint8)
    state = ring.out.end.state
    state.window, windows = WINDOW.nbytes, [WINDOW.nbytes]
    for _ in range(64 * 100):
        assert ring.put(data, RING)
        assert ring.take(len(data)) is not None
        if state.window != windows[-1]:
            windows.append(state.window)
    assert windows == [8 * RING, 4 * RING, 2 * RING, RING]


@pytest.mark.parametrize("jump", [LINE, LINE + 1, 3 * LINE])
def test_a_jump_that_cannot_be_is_an_error_and_nothing_is_read(jump: int) -> None:
    ring = Ring(WINDOW)
    ring.out.end.publish(5 * LINE)
    ring.out.words.store(protocol.num_words(1), jump)
    target = torch.zeros(4 * LINE, dtype=torch.uint8)
    for call in (
        ring.into.next_line,
        lambda: ring.into.pull(Span.flat(target.data_ptr()), 0, len(target), LINE, patient=True),
    ):
        with pytest.raises(WireError, match="jump"):
            call()
    assert not target.any() and ring.into.end.read == 0


# -- words that cannot be true -------------------------------------------------------------------------


@pytest.mark.parametrize("word", [2**64 - 2, 2 * (RING + 1), 2**63, None])
def test_for_an_end_that_was_given_up_or_says_what_cannot_be_nothing_is_moved(word: int | None) -> None:
    ring = Ring()
    data = torch.ones(600, dtype=torch.uint8)
    span = Span.flat(data.data_ptr())
    if word is None:
        ring.out.end.evict(0)
    else:
        ring.out.words.store(protocol.tail(0), word)
        ring.out.words.store(protocol.HEAD, word)
    before = bytes(ring.memory.view)
    assert ring.out.push(b"p" * LINE, span, 0, 600, patient=True) == 0
    assert bytes(ring.memory.view) == before
    if word is not None and word < 2**63:
        with pytest.raises(WireError):
            ring.into.pull(span, 0, 600, 0, patient=True)
        with pytest.raises(WireError):
            ring.into.next_line()


def shown_and_withdrawn(what: str) -> ring_library.Change:
    """In the C function that spins for this: the other end shows it now, and has withdrawn it afterwards."""
    head = f"static int spin_for_{what}(const struct end *"
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
    steps_that_are_misled: Any, what: str, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplug_shm.memory.words.library", lambda: steps_that_are_misled)
    memory = segment()
    out, into = Outgoing(memory, 0, SIZES, 1.0), Incoming(memory, 0, SIZES, 1.0)
    data = torch.zeros(MIB, dtype=torch.uint8)  # large, so that the call lets other threads run
    span = Span.flat(data.data_ptr())
    if what == "room":
        out.end.publish(RING)
        moves = Call(lambda: out.push(b"", span, 0, MIB, patient=patient))
    else:
        moves = Call(lambda: into.pull(span, 0, MIB, 0, patient=patient))
    try:
        assert moves.result(10) == 0
    finally:  # the thread must not run on
        out.end.publish(RING) if what == "units" else into.end.release(RING)
        moves.end()


def test_an_end_whose_memory_was_released_raises() -> None:
    words = Words(segment(4096), 0, protocol.num_words(1))
    writer, reader = WritingEnd(words, 1, 8), ReadingEnd(words, 0, 8)
    words.words.release()
    for call in (writer.publish, writer.poll, writer.room, reader.release, reader.poll, reader.available):
        with pytest.raises(ValueError, match="released"):
            call()
