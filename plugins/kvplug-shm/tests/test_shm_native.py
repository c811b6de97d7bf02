"""The compiled steps do what those in Python do: the same bytes and words, whatever the other end says."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import ring_library
import shm_pipe_ends as ends_of_pipes
from kvplug import TimeoutError
from kvplug.transport import Blocks, Segment, WireError
from kvplug_shm.memory.pool import Pool
from kvplug_shm.memory.words import Words
from kvplug_shm.native import library as native
from kvplug_shm.native.ends import (
    NativeReadingEnd,
    NativeWritingEnd,
    copy_for_one_of,
    reading_end,
    writing_end,
)
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import LINE, Pieces, lines, segment_size
from kvplug_shm.pipe.header import Header
from kvplug_shm.pipe.native import NativeIncoming, NativeOutgoing, incoming, outgoing
from kvplug_shm.pipe.rings import Incoming, Outgoing
from kvplug_shm.ring import protocol
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd
from kvplug_testing.comparison import assert_filled, assert_same

by_hand, local_pair = ends_of_pipes.by_hand, ends_of_pipes.local_pair
STEPS_THERE: Any = native.library()
compiled = pytest.mark.skipif(STEPS_THERE is None, reason="this installation has no compiled steps")
RING = 1024
WHOLE = Pieces(at_once=0, smallest=2**30, largest=2**30)
PIECES = Pieces(at_once=500, smallest=2 * LINE, largest=4 * LINE)


def segment(nbytes: int = segment_size(RING)) -> Segment:
    made, fd = Segment.create("test", nbytes)
    os.close(fd)
    return made


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_what_is_compiled_is_there_where_a_compiler_is() -> None:
    assert native.library() is not None, "every other test here is skipped: install kvplug-shm again"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_the_source_gives_no_warning(tmp_path: Path) -> None:
    source = Path(native.__file__).with_name("ring.c")
    flags = ["-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    subprocess.run(["cc", *flags, "-o", str(tmp_path / "ring.so"), str(source)], check=True, timeout=120)


@pytest.mark.parametrize("content", [b"", b"no library", None])
def test_a_library_that_cannot_be_used_is_told_and_done_without(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "_ring.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native, "_FILE", path)
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert ("using Python instead" in caplog.text) is (content is not None)


@compiled
def test_a_library_of_another_source_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "ring.c"
    source.write_bytes(native._SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native, "_SOURCE", source)
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    assert native.library() is None
    assert "another ring.c" in caplog.text


def test_who_does_not_want_them_gets_none() -> None:
    words = Words(segment(4096), 0, protocol.num_words(2))
    assert type(writing_end(words, 2, 8, native=False)) is WritingEnd
    assert type(reading_end(words, 1, 8, native=False)) is ReadingEnd
    assert type(outgoing(segment(), 0, RING, None, 0.0)) is Outgoing
    assert type(incoming(segment(), 0, RING, None, 0.0)) is Incoming


WORD = st.one_of(
    st.integers(0, 40),
    st.sampled_from([2**64 - 1, 2**64 - 2, 2**63, 2**63 - 1, 2**32]),
)


class Ring:
    """One ring in memory of its own, its ends in Python or compiled."""

    def __init__(self, compiled: bool, memory: Any = None) -> None:
        steps = native.library() if compiled else None
        self.memory = memory or segment()
        self.out = outgoing(self.memory, 0, RING, steps, 0.0)
        self.into = incoming(self.memory, 0, RING, steps, 0.0)

    def put(self, nbytes: int, limit: int) -> Any:
        data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        return self.out.put(Header(b"p" * LINE, nbytes), data.data_ptr(), PIECES, limit)

    def take(self, nbytes: int) -> Any:
        here, line = self.into.next_line()
        if here < LINE + lines(nbytes):
            return here
        target = torch.zeros(nbytes, dtype=torch.uint8)
        self.into.take(target.data_ptr(), nbytes)
        return line, target.tolist()

    def step(self, what: str, *args: int) -> Any:
        """What comes of it: a result or an error, and all of the memory."""
        try:
            result = getattr(self, what)(*args)
        except WireError as e:
            result = str(e)
        return result, self.out.end.sent, self.into.end.read, bytes(self.memory.view)

    def say(self, word: int, value: int) -> None:
        self.out.words.words[word] = value


STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 500), st.integers(0, 2 * RING)),
    st.tuples(st.just("take"), st.integers(0, 500)),
    st.tuples(st.just("say"), st.integers(0, protocol.num_words(1) - 1), WORD),
)


@compiled
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_whatever_is_put_taken_and_said_both_leave_the_same(steps: list[tuple[Any, ...]]) -> None:
    python, compiled = Ring(False), Ring(True)
    for step in steps:
        assert compiled.step(*step) == python.step(*step)


@compiled
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(WORD, min_size=8, max_size=8), st.integers(0, 20), st.integers(1, 9))
def test_both_agree_on_what_is_blocked_on(values: list[int], at: int, count: int) -> None:
    words = Words(segment(4096), 0, protocol.num_words(2))
    words.words[:] = memoryview(ctypes.create_string_buffer(64)).cast("B").cast("Q")[:8]
    for index, value in enumerate(values):
        words.words[index] = value
    steps = native.library()
    assert steps is not None
    for reader in (0, 1):
        ends = [
            ReadingEnd(words, reader, 8, read=at),
            NativeReadingEnd(steps, words, reader, 8, read=at),
        ]
        python, compiled = (end.spin(count, 0.0) for end in ends)
        assert compiled == python
        python, compiled = (end.poll(count, 0.0, 0.0) for end in ends)
        assert compiled == python
    writing = WritingEnd(words, 2, 8, sent=at), NativeWritingEnd(steps, words, 2, 8, sent=at)
    try:
        room = writing[0].room()
    except WireError:
        assert writing[1].spin(count, 0.0)  # do not wait: the next access raises the error
        return
    assert writing[1].spin(count, 0.0) == (room >= count)


@compiled
@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=3), st.integers(1, 5))
def test_whoever_sleeps_is_woken_and_nobody_else(sleeping: list[bool], count: int) -> None:
    steps = native.library()
    assert steps is not None
    for make in (NativeWritingEnd, NativeReadingEnd):
        left = []
        for chosen in (True, False):
            words = Words(segment(4096), 0, protocol.num_words(3))
            for reader, asleep in enumerate(sleeping):
                words.words[protocol.asleep(reader)] = asleep
            if make is NativeWritingEnd:
                end = make(steps, words, 3, 8) if chosen else WritingEnd(words, 3, 8)
                end.publish(count)
            else:
                end = make(steps, words, 1, 8) if chosen else ReadingEnd(words, 1, 8)
                end.release(count)
            left.append(list(words.words))
        assert left[0] == left[1]


@compiled
@given(st.integers(0, RING // LINE), st.integers(101, RING // 2), st.integers(0, 2 * RING))
def test_what_is_put_in_pieces_lies_there_as_what_is_put_at_once(shift: int, nbytes: int, limit: int) -> None:
    left = []
    for at_once in (100, RING):
        ring = Ring(True)
        ring.out.end.publish(shift * LINE)
        ring.into.end.release(max(0, shift - 3) * LINE)
        data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        pieces = Pieces(at_once=at_once, smallest=LINE, largest=2 * LINE)
        done = ring.out.put(Header(b"p" * LINE, nbytes), data.data_ptr(), pieces, limit)
        left.append((done, ring.out.end.sent, bytes(ring.memory.view)))
    assert left[0] == left[1]


@compiled
@pytest.mark.parametrize("native_reader", [True, False])
def test_a_reader_that_looked_in_vain_sleeps_until_it_is_woken(native_reader: bool) -> None:
    ring = Ring(native_reader)
    writer, reader = Ring(True, ring.memory).out.end, ring.into.end
    came: list[bool] = []
    thread = threading.Thread(target=lambda: came.append(reader.poll(LINE, 1e-5, 3600.0)), daemon=True)
    words = ring.out.words.words
    thread.start()
    while not words[protocol.asleep(0)]:
        time.sleep(0.001)
    assert not came
    writer.publish(LINE)
    thread.join(30)
    assert came == [True]
    assert not words[protocol.asleep(0)]
    assert reader.poll(LINE, 0.0, 3600.0)  # the data is there: it does not sleep
    writer.end()
    assert not reader.poll(2 * LINE, 0.0, 3600.0)  # it does not sleep on the word of an ended end


@compiled
@pytest.mark.parametrize("spin_s", [0.0, 3600.0])
def test_a_signal_ends_the_sleep_of_a_reader(spin_s: float) -> None:
    ring = Ring(True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            ring.into.end.poll(LINE, spin_s, 3600.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not ring.out.words.words[protocol.asleep(0)]


@compiled
@pytest.mark.parametrize("asleep", ["the reader", "the writer"])
def test_a_sleeper_is_woken_by_what_is_announced(asleep: str) -> None:
    ring = Ring(True)
    out, into = ring.out.end, ring.into.end
    if asleep == "the writer":
        out.publish(RING)
    sleeper, waker = (into, out) if asleep == "the reader" else (out, into)

    def sleep() -> None:
        while (awaited := sleeper.blocked_on(LINE)) is not None:
            sleeper.park(awaited)  # without an end

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    word = protocol.asleep(0) if asleep == "the reader" else protocol.WRITER_ASLEEP
    while not ring.out.words.words[word]:
        time.sleep(0.001)
    waker.publish(LINE) if waker is out else waker.release(LINE)  # type: ignore[union-attr]
    thread.join(30)
    assert not thread.is_alive()


def moved(
    compiled: tuple[bool, bool], data: torch.Tensor, spans: tuple[Any, Any], target: torch.Tensor
) -> int:
    """Push and pull a message of blocks or bytes, in turns, through a ring much smaller than it."""
    memory, steps = segment(), native.library()
    assert steps is not None
    out = NativeOutgoing(steps, memory, 0, RING, 0.0)
    into = NativeIncoming(steps, memory, 0, RING, 0.0)
    prefix, nbytes = b"p" * LINE, data.numel() * data.element_size()
    sent = got = turns = 0
    unreleased = 0
    while got < nbytes:
        turns += 1
        before = out.end.sent
        sent += out.push(b"" if turns > 1 else prefix, spans[0], sent, nbytes, PIECES, patient=False)
        if turns == 1:
            assert out.end.sent > before
            assert into.next_line()[1] == prefix
            unreleased = LINE
        taken = into.pull(spans[1], got, nbytes, unreleased, PIECES.largest, patient=False)
        if taken:
            unreleased = 0
        got += taken
        assert turns < 10 * nbytes
    assert into.end.available() == 0
    return turns


@compiled
@pytest.mark.parametrize("row", [(3, 35), (64,), (1,), (700,)])
@pytest.mark.parametrize("flat", ["neither", "source", "target"])
def test_blocks_and_bytes_go_through_a_ring_that_is_smaller(row: tuple[int, ...], flat: str) -> None:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 2**15, (12, 2, *row), generator=generator, dtype=torch.int16)
    target = torch.zeros_like(source)
    there, here = [7, 2, 11, 0, 5], [1, 2, 3, 9, 0]
    sending = Blocks([source[:, 0], source[:, 1]], there)
    receiving = Blocks([target[:, 0], target[:, 1]], here)
    message, got = sending.gathered(), receiving.empty()
    spans = (
        Span.flat(message.data_ptr()) if flat == "source" else Span.of_blocks(sending),
        Span.flat(got.data_ptr()) if flat == "target" else Span.of_blocks(receiving),
    )
    assert None not in spans
    moved((True, True), message, spans, target)
    assert_same(message, got if flat == "target" else receiving.gathered())
    untouched = [each for each in range(12) if each not in here]
    assert not target[untouched].any()


def test_rows_in_many_axes_are_not_described() -> None:
    cache = torch.zeros(4, 6, 5)
    assert Span.of_blocks(Blocks([cache.transpose(1, 2)], [0, 1])) is not None
    assert Span.of_blocks(Blocks([torch.zeros(2, 3, 3, 3, 3, 3, 2)[..., 1:, 1:, 1:, 1:, :1]], [0])) is None
    assert Span.of_blocks(Blocks([cache[:, :, :0]], [0])) is None
    assert Span.of_blocks(Blocks([cache], [])) is None
    assert Span.of_blocks(Blocks([cache[::2]], [1])) is not None


@compiled
def test_nothing_is_pushed_for_a_reader_that_was_given_up() -> None:
    ring = Ring(True)
    data = torch.ones(600, dtype=torch.uint8)
    ring.out.end.evict(0)
    assert isinstance(ring.out, NativeOutgoing)
    before = bytes(ring.memory.view)
    assert ring.out.push(b"p" * LINE, Span.flat(data.data_ptr()), 0, 600, PIECES, patient=True) == 0
    assert bytes(ring.memory.view) == before


@compiled
@pytest.mark.parametrize("word", [2**64 - 2, 2 * (RING + 1), 2**63])
def test_words_that_cannot_be_true_move_nothing(word: int) -> None:
    ring = Ring(True)
    assert isinstance(ring.out, NativeOutgoing)
    assert isinstance(ring.into, NativeIncoming)
    data = torch.ones(600, dtype=torch.uint8)
    span = Span.flat(data.data_ptr())
    ring.say(protocol.tail(0), word)
    ring.say(protocol.HEAD, word)
    assert ring.out.push(b"", span, 0, 600, PIECES, patient=True) == 0
    if word < 2**63:
        assert ring.into.pull(span, 0, 600, 0, LINE, patient=True) == 0
        with pytest.raises(WireError):
            ring.into.next_line()


MIB = 1024 * 1024


def shown_and_withdrawn(what: str) -> ring_library.Change:
    """In the C function that spins for this: the other end shows it now, and has withdrawn it afterwards."""
    head = f"int kvplug_spin_for_{what}(const struct end *"
    stand_in = f"{head}e, int64_t c, int64_t s) {{ (void)e, (void)c, (void)s; return 1; }}"
    return f"{head}end", f"{stand_in}\nint really_spin_for_{what}(const struct end *end"


@pytest.mark.skipif(ring_library.compiler() is None, reason="there is no compiler")
@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("what", ["room", "units"])
def test_an_end_that_shows_and_withdraws_holds_no_call(
    what: str, patient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = ring_library.build(tmp_path, shown_and_withdrawn(what))
    monkeypatch.setattr(native, "_FILE", built)
    monkeypatch.setattr(native, "_SOURCE", built.with_name("ring.c"))
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    steps = native.library()
    assert steps is not None
    memory = segment()
    out = NativeOutgoing(steps, memory, 0, RING, 1.0)
    into = NativeIncoming(steps, memory, 0, RING, 1.0)
    data = torch.zeros(MIB, dtype=torch.uint8)  # large, so that the call lets other threads run
    span, moved = Span.flat(data.data_ptr()), []
    if what == "room":
        out.end.publish(RING)

    def move() -> None:
        if what == "room":
            moved.append(out.push(b"", span, 0, MIB, PIECES, patient=patient))
        else:
            moved.append(into.pull(span, 0, MIB, 0, LINE, patient=patient))

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    thread.join(10)
    try:
        assert moved == [0]
    finally:  # the thread must not run on
        out.end.publish(RING) if what == "units" else into.end.release(RING)
        thread.join(10)


@compiled
@pytest.mark.parametrize("offset", [0, 1, 63], ids="at {}".format)
def test_a_message_that_is_stored_past_the_caches_arrives_whole(local_pair: Any, offset: int) -> None:
    sender, receiver = local_pair()
    tensor = torch.arange(33 * MIB // 4 + 1, dtype=torch.int32).view(torch.uint8)
    out = torch.full((64 + len(tensor) + 64,), 7, dtype=torch.uint8)
    within = out[offset : offset + len(tensor)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send_tensor, tensor)
        receiver.recv_tensor(out=within)
        sending.result().wait()
    assert_same(tensor, within)
    assert set(out[:offset].tolist()) | set(out[offset + len(tensor) :].tolist()) == {7}


@compiled
@pytest.mark.parametrize("num_readers", [1, 64])
@pytest.mark.parametrize("offset", [0, 1, 63], ids="at {}".format)
def test_one_copy_of_many_is_whole_past_the_caches_and_not(offset: int, num_readers: int) -> None:
    copy = copy_for_one_of(num_readers, native=True)
    source = torch.arange(MIB + 1, dtype=torch.int32).view(torch.uint8)
    out = torch.full((64 + len(source) + 64,), 7, dtype=torch.uint8)
    within = memoryview(out.numpy())[offset : offset + len(source)]
    copy(within, memoryview(source.numpy()).toreadonly())
    assert_same(source, out[offset : offset + len(source)])
    assert set(out[:offset].tolist()) | set(out[offset + len(source) :].tolist()) == {7}
    with pytest.raises(ValueError):
        copy(within[1:], memoryview(source.numpy()))


@compiled
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one processor")
@pytest.mark.parametrize("bound", [False, True], ids=["anywhere", "bound to its processor"])
def test_a_reader_leaves_the_processor_of_its_writer_unless_it_is_bound_to_it(bound: bool) -> None:
    where = ctypes.CDLL(None).sched_getcpu
    everywhere = os.sched_getaffinity(0)
    if len(everywhere) < (os.cpu_count() or 1):
        pytest.skip("this process is bound to some processors")
    data = torch.zeros(2 * MIB, dtype=torch.uint8)
    span, num_moved = Span.flat(data.data_ptr()), 0
    try:
        for _ in range(20):
            memory = segment(segment_size(4 * MIB))
            out = NativeOutgoing(STEPS_THERE, memory, 0, 4 * MIB, 0.0)
            into = NativeIncoming(STEPS_THERE, memory, 0, 4 * MIB, 0.0)
            before = where()
            if bound:
                os.sched_setaffinity(0, everywhere - {max(everywhere - {before})})
            allowed = os.sched_getaffinity(0)
            out.push(b"p" * LINE, span, 0, len(data), WHOLE, patient=False)
            into.pull(span, 0, len(data), LINE, len(data), patient=False)
            num_moved += where() != before
            assert os.sched_getaffinity(0) == allowed
    finally:
        os.sched_setaffinity(0, everywhere)
    assert bound or num_moved > 10  # the kernel moves it hardly ever, and may move it back


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="there is no compiler")
@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler", "false"])
def test_the_wheel_has_them_where_a_compiler_is(compiler: str, tmp_path: Path) -> None:
    hook = Path(__file__).parents[1] / "hatch_build.py"
    assert hook.exists()
    code = (
        "import sys, runpy, tomllib; from types import SimpleNamespace as N\n"
        "hook = runpy.run_path(sys.argv[1])['CompiledSteps']\n"
        "project = tomllib.load(open(sys.argv[2] + '/pyproject.toml', 'rb'))\n"
        "config = project['tool']['hatch']['build']['hooks']['custom']\n"
        "told = []\n"
        "data = {'force_include': {}}\n"
        "app = N(display_warning=told.append)\n"
        "build = hook(sys.argv[2], config, None, None, '', 'wheel', app)\n"
        "build.initialize('standard', data)\n"
        "print(data.get('tag', 'pure'), len(data['force_include']), bool(told))\n"
        "build.finalize('standard', data, '')\n"
    )
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-c", code, str(hook), str(hook.parent)],
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    tag, included, told = done.stdout.split()
    assert (tag == "pure", included, told) == (
        (False, "1", "False") if compiler == "cc" else (True, "0", "True")
    )


@compiled
def test_an_end_whose_memory_was_let_go_of_says_so() -> None:
    words = Words(segment(4096), 0, protocol.num_words(1))
    ends = writing_end(words, 1, 8, native=True), reading_end(words, 0, 8, native=True)
    words.words.release()
    spins = [functools.partial(end.spin, 1, 0.0) for end in ends]
    for call in (ends[0].publish, ends[1].release, *spins, functools.partial(ends[1].poll, 1, 0.0, 0.0)):
        with pytest.raises(ValueError, match="released"):
            call()


@compiled
@pytest.mark.parametrize("end", ["the reader", "the writer"])
def test_a_signal_is_handled_however_long_it_is_looked(end: str) -> None:
    ring = Ring(True)
    ring.out.end.publish(RING)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    waiting = ring.into.end if end == "the reader" else ring.out.end
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            waiting.spin(RING + LINE if end == "the reader" else LINE, 3600.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@compiled
@pytest.mark.parametrize("by_hand", [True], indirect=True)
@pytest.mark.parametrize(("ring", "name"), [(NativeOutgoing, "push"), (NativeIncoming, "pull")])
def test_after_the_deadline_nothing_is_looked_for(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch, ring: Any, name: str
) -> None:
    """Else a peer that does a little now and then holds the call for as long as it likes."""
    step, found, caller = getattr(ring, name), [], threading.current_thread()

    def seen(*args: Any, patient: bool, **given: Any) -> int:
        if threading.current_thread() is caller:
            found.append(patient)
        return step(*args, patient=patient, **given)

    monkeypatch.setattr(ring, name, seen)
    peer, pipe = by_hand()
    large = torch.zeros(1 << 26, dtype=torch.uint8)
    if name == "push":
        pipe.send_tensor(large, timeout=0)
    else:  # an announcement of far more than comes
        peer.lay(ends_of_pipes.prefix_of(large) + bytes(8 * LINE))
        with pytest.raises(TimeoutError, match="have arrived"):
            pipe.recv_tensor(timeout=0)
    assert found
    assert not any(found)


@compiled
def test_blocks_that_wait_for_room_take_no_memory(local_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = local_pair(native=True)
    source, target = (torch.full((40, 1 << 18), value, dtype=torch.uint8) for value in (1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "tensor", None)
        transfer = one.send_blocks([source], range(40))
    assert not transfer.done()
    other.recv_blocks([target], range(40))
    transfer.wait(30)
    assert_filled(1, target, "blocks that waited were not sent")
