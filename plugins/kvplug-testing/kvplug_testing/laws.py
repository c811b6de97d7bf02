"""The laws by id. Tests name the ids, and failures quote the laws. docs/reference/laws.md is generated from
them.

``python -m kvplug_testing.laws PIPE-5 COMM`` prints this law and those of this kind; without an id, all of
them. A message that names a law refers to this program: a page of the repository is not in the wheel.
``python -m kvplug_testing.laws --page docs/reference/laws.md`` updates the page.
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import attrs

from kvplug.config.messages import listed

_WIDTH = 100
"""Columns of a law on the terminal."""
_PAGE_WIDTH = 118
"""Columns of a law on the page."""
_BEGIN = "<!-- Laws, made of laws.py: `python -m kvplug_testing.laws --page docs/reference/laws.md`. -->\n"
_END = "<!-- The end of the laws. -->\n"


@attrs.frozen
class Law:
    """One law."""

    id: str
    """``"PIPE-5"``: a kind and a number."""
    title: str
    text: str
    """The law itself, in Markdown, on one line."""
    section: str
    """The heading of its section."""

    @property
    def quoted(self) -> str:
        """Id and title, and the text below them."""
        lines = textwrap.wrap(self.text, _WIDTH, break_on_hyphens=False)
        return f"law {self}:\n" + "\n".join(f"    {line}" for line in lines)

    def __str__(self) -> str:
        return f"{self.id} ({self.title})"


_WRITTEN = """
## Everything with an end

ALL-1, closing
: `close()` waits up to its timeout until started work is finished. `abort()` ends at once and never blocks.
  Both may be called twice. Afterwards every call raises `ClosedError`. A communicator's `destroy()` does
  both.

ALL-2, a dead peer
: When the process at the other end dies, every call raises `PeerGoneError`, also a call that is already
  blocked. Messages that have arrived completely may still be received (a queue's reader always gets them);
  a part of a message is never received. The death of one reader is no error for the writer of a queue.
  Requests to a store do not raise: they are misses.

ALL-3, a silent peer
: A process on this host that is stopped or busy is alive: calls end with `TimeoutError`. If a process
  cannot be observed (another host, another pid namespace), silence of `heartbeat_timeout_s` counts as its
  death. The connection is then fenced, and blocks that were lent to it stay in quarantine.

ALL-4, time
: Every call that can block has a parameter `timeout`: seconds, or `None` for ever. Its default is the
  config's `timeout_s`, which is finite. `TimeoutError` says what the call waited for.

ALL-5, every transfer ends
: Every transfer ends in success or in an error, also when the peer is killed or its host disappears. A
  failure is reported to the waiting caller, not only logged.

ALL-6, forks
: In a forked child, every open object is closed: its calls raise `ClosedError`, and the child holds none of
  its descriptors and of its shared memory. In the parent the objects go on working.

ALL-7, nothing left behind
: After all objects of a transport are closed, a process holds no descriptor, thread, child, socket name or
  shared memory that it did not hold before, and its memory does not grow when this is repeated. No resource
  of a killed process remains.

ALL-8, leaving the program
: A program that leaves, by `sys.exit` or at its last line, ends within seconds with its own exit code, and
  writes nothing to stderr: right after `abort()`, right after `close()`, and if nothing was closed, also
  while threads of the transport, or of the program in calls of it, are at work. So does a forked child.

ALL-9, exhaustion
: If a process has no free descriptor, thread, memory or space, a call that needs one raises
  `ResourceExhaustedError`, which names what ran out. It leaves nothing behind, and nothing is remembered: the
  next try succeeds as soon as there is enough. An object that was in use may be broken, and then says so.

ALL-10, a peer that lies
: What a peer says after it has proved its identity is checked before it is used, and before memory is taken
  for it. Whatever a peer says, in a message or in memory that it has handed over, every call ends within its
  timeout, in a result or in an error of kvplug's; the process lives on, and holds no more memory, threads or
  descriptors than for honest peers. Memory is taken for at most `max_message_bytes`, or for what the process
  can have. A result is what was asked for as far as its structure shows it: shape and dtype, tokens, order.
  That its bytes are what the peer's own program stored is not promised without a hash.

## Endpoints

END-1, two verbs
: `listen()` returns a listener with a contact, a short opaque string; `connect(contact)` returns a pipe. A
  transport implements no other way to connect.

END-2, coming and going
: Peers connect and end while other pipes work, and do not disturb them.

## Pipe

PIPE-1, what arrives
: Each tensor arrives whole, once, in the order of sending, with its shape, its dtype and its bits: every
  dtype of torch (bfloat16, the float8 kinds and bool among them), tensors without dimensions, without
  elements, and not contiguous ones. `None` is a message too. `send_blocks` sends the given blocks of all
  layers as one tensor, layer after layer, in the given order, whatever the strides of the views are.

PIPE-2, sending
: `send_tensor` returns a `Transfer` at once while fewer than `max_in_flight_bytes` are unsent; otherwise it
  blocks. A message larger than the limit passes alone. When it raises `TimeoutError`, nothing was queued.

PIPE-3, what is held
: While the receiver is stopped, the pipe holds at most the limit and one message.

PIPE-4, whose memory
: The pipe keeps the tensor alive. Its content belongs to the pipe until `transfer.done()`; then the caller
  may overwrite it. `done()` does not mean that the peer has read it.

PIPE-5, receiving into memory
: `recv_tensor(out=...)` fills `out`, contiguous or not. If the message has another shape or dtype, or is
  `None`, it raises `TensorMismatchError` and the message stays. `recv_blocks` fills the given
  blocks of its views, and no others; it reports each layer once, in order, when it is whole.

PIPE-6, a receive that runs out of time
: If it runs out of time before the first byte, nothing is lost. After the first byte, the next call
  continues with the same message, or the pipe is broken and reports it. A message is never skipped.

PIPE-7, threads
: One thread may send while another one receives. A second thread in the same direction gets `BusyError`,
  never a mixed stream.

## Message queue

QUEUE-1, every reader, every message
: Each reader named in the handle gets each message once, in order, from the first one on, or an error that
  says how many it lost. Nothing is dropped silently, also not on a network.

QUEUE-2, dead readers
: A reader that died is evicted, named and reported. The other readers continue.

QUEUE-3, waiting
: A writer that has to wait names the readers that it waits for: rank, process, and how far each is behind.

QUEUE-4, idling
: A reader that waits costs next to no processor time.

QUEUE-5, chunks
: The slowest reader may have as many unread messages as there are chunks; then the writer waits, and a call
  that runs out of time has sent nothing. A chunk is written and read in place, and released when its block
  ends, also by an exception: a message that the writer's block left by an exception is not sent; one that a
  reader's block left counts as read.

## Device communicator

COMM-1, what a collective gives
: Every rank gets the result that the collective's documentation states, in whatever order the ranks call:
  the sum of all inputs, their concatenation in the order of ranks along any dimension, or its rank's part
  of either. With one rank the result is its own input.

COMM-2, taking part
: A collective ends when every rank of the group has called it, in the same order of calls. All other ranks
  get a `TimeoutError` or `PeerGoneError` that names a rank which does not call, or has died. After either
  error the communicator is broken, since ranks would be in different calls: later calls raise
  `TransportError` at once, and a rank that calls late gets an error, never a result. If ranks do not
  compare their calls first, a rank that only sends may be done before the others call.

COMM-3, what is refused
: Tensors that do not fit together (dtype, shape, device, sizes that do not add up, a dimension that does
  not exist, a rank outside the group) are refused at every rank with an error that states the given and the
  expected value, and the communicator stays usable. A communicator whose ranks do not compare their calls
  first (`compares`) refuses only what is wrong at one rank by itself. If a batch that does not fit involves
  several other ranks, those may have begun, and the communicator is broken; the same holds if a rank sends
  or receives while several others are in a collective.

COMM-4, experts
: With an all-to-all manager, `dispatch` gives every rank the tokens of all ranks and the extra tensors, in
  the order of ranks and for any numbers of tokens; tokens that several ranks share come once. `combine`
  gives each rank the complete rows of its own tokens in the sum over all ranks. Without a manager they
  change nothing.

COMM-5, sleep
: Between `suspend` and `resume` every call raises `TransportError`; afterwards everything works as before.
  Both may be called twice.

## Lookup buffer

LOOKUP-1, the key
: An entry's key is its `extra` bytes and its tokens under the roi. `extra` must be equal. Token ids are
  compared exactly, as integers, even if their hashes are equal.

LOOKUP-2, matching
: An entry matches a query when one token sequence is a prefix of the other and not empty. Of several the
  oldest wins. A miss is a miss, never another key's data.

LOOKUP-3, `match`
: Returns the length of the longest prefix that the query shares with any stored entry, whatever follows in
  either. It never waits; if no entry shares a token, the answer is 0, not an error.

LOOKUP-4, `drop_select`
: Removes the entry and hands it to one caller. If this caller dies before it has received all of it, the
  entry is available again. It waits for an entry until its timeout, then raises `TimeoutError`.

LOOKUP-5, capacity
: `insert` waits for free capacity until its timeout. An entry larger than the whole budget is refused at
  once, with `CapacityError`.

LOOKUP-6, cost
: Finding takes time in proportion to the prompt, not to the number of entries.

LOOKUP-7, `select`
: Reads the entry that shares the longest prefix and leaves it in the buffer. While an entry is read, it can
  neither be taken nor evicted. If no entry shares enough, `EntryGoneError` is raised at once.

## Store

STORE-1, what is got
: A page that is got is the page that was put, bit for bit, whatever its parts, dtypes, layers and size, and
  whatever memory it comes from and goes to. It is verified against its header and its checksums before the
  caller may use it; a layer is released only when it is verified for all pages of the request. Everything
  else is a miss with its reason: there is no page, it is the page of other tokens, it has another format, or
  its bytes are wrong. A page with wrong bytes makes room for a right one.

STORE-2, whole or not at all
: A page is visible whole or not at all, also after its writer was killed at any point. The first whole put of
  a key wins: a later one counts as kept and changes nothing. Of two writers with different bits one wins, and
  there is never a mixture.

STORE-3, time
: `submit_*` never waits, and every job ends by its deadline, also while the store's process is stopped or its
  disk does not answer: what is not known by then is a miss with the reason `timeout`. A cancelled job ends at
  once. After a job has settled, the store does not touch the caller's memory.

STORE-4, tenants and forgery
: A page is found only with the extra, namespace, format, shard and secret that it was put with; with others
  it is a miss. With a secret, a page that was made or changed without it is a miss with the reason `forged`.

STORE-5, leases and generations
: A leased page is not evicted until the lease is released or has expired. Leases of an end that was closed,
  or whose process was killed, end soon. A lease only postpones eviction: a reader that was held up while its
  page was evicted and the memory used again gets the right bytes or a miss.

STORE-6, the budget
: `used_bytes` never exceeds `budget_bytes`, with headers and the waste between pages counted. Room is made by
  evicting pages by their use: those that were used longest ago, or least often. A page without room is a
  result (`no_room`), and so is a page that is larger than the budget (`too_large`). Neither `used_bytes` nor
  the memory of the process grow with the number of pages that came and went.

STORE-7, a store that is gone
: A store that cannot be reached is a miss with the reason `store_gone`, and neither an exception nor a hang.
  Unless `is_lost` says that it is gone for good, it is tried again after a while, and then works as before.

STORE-8, pages that are declared
: A declared page is `COMING` until it is put, withdrawn, or its time is over; from then on it is `HELD` or
  `ABSENT`. A page that is held is `HELD`, whatever is declared.

STORE-9, forgetting
: When the job of `submit_remove` has ended with `True`, the pages are absent. A put that this end had begun
  and not ended when it was called does not bring them back, and declared pages are no longer `COMING`.

STORE-10, what is there
: `keys` has the held keys of its series and no others, and `usage` the number of pages and their bytes. A
  listener of a store with events gets a snapshot and then every change, in the order of their numbers and
  without a gap: an index made of them has the keys that `keys` has, and the pages that are expected.

STORE-11, memory on a device
: Pages come from and go to a cache on a device like others, staged through host memory where the store does
  not serve that device itself. They are read after what the calling thread has queued there by then, and what
  it queues next runs after that: blocks may be used again at once. They are written after what must have run
  before (`PageBlocks.after`), and count as there only when the device has written them. A job ends by its
  deadline also while the device does nothing, and settles when the device is done with its memory.

## Directory

DIR-1, announcements
: An entry is seen by every process, as it was announced, from the next question on. A later announcement of
  its name replaces it, whoever made it; other names stay as they are. What is withdrawn is gone.

DIR-2, leases
: An entry stays while it is renewed, and is gone at most some seconds after the end of its lease, whatever
  became of its process. The next announcement restores what was lost.

DIR-3, time
: Making one waits for nothing. Other calls end within `timeout_s`, also while the service is stopped.

## Connector

CONN-1, order
: An engine calls the methods in the documented order; a connector may rely on it, and names the call that
  breaks it. Where the order leaves the position of a call open, a connector works with every position.

CONN-2, promises
: A connector promises the scheduler only tokens whose KV can be loaded.

CONN-3, failed loads
: A block that could not be loaded is reported in the same step. The engine then computes it again or fails
  the request, by its policy. Wrong KV is never used.

CONN-4, lent blocks
: Blocks that a transfer still reads or writes are not reused until `get_finished` names the request, or its
  peer is known to be gone.

CONN-5, named once
: `get_finished` names each request once. A request that ended while it was loading in the background is
  named as received, and not also as sent, whatever `request_finished` returned.

CONN-6, steps in flight
: A step may be planned before it is known that a load of the previous step has failed. Nothing that such a
  step gathers from those blocks, or computes from them, is stored or sent.

CONN-7, forgetting
: If `reset_cache` returns true, no later request of this engine loads anything that was computed before;
  other engines load nothing old from it after its next step. If a connector cannot ensure this, it returns
  false.

CONN-8, figures
: A connector's figures add up: every started transfer is counted once, as done, or as failed with its
  reason.

CONN-9, steps that go on
: A load in the background holds up no call of the engine, whatever its peer does, and an engine that lets
  every request wait for its load gets no other loads from a connector that can do both. A load of which
  nothing comes fails after a limit of its own, much less than `timeout_s`, and no step waits longer for it.

CONN-10, caches on a device
: All of this holds for caches on a device, whose kernels and copies run some time after the engine's calls:
  KV is read after the kernels that compute it, blocks are used again after they were read, KV is written
  after the kernels that still use its blocks, and counts as loaded only once it is there.

## References to blocks

REF-1, what they carry
: A reference to another engine's blocks carries the engine's id, its epoch (which changes with each start),
  the lease and the request's generation.

REF-2, through strangers' hands
: A reference that travels through a client's request carries a ticket: a keyed hash with an expiry over all
  of it. A stale, forged or out-of-range reference is a miss with a counted reason, and no address in it is
  contacted.

## Plugins

PLUGIN-1, being found
: A plugin states its API version as a literal, is found through one entry point, loads without other
  plugins, and offers each name once.

PLUGIN-2, light to load
: Its entry point, options and probes import no torch, numpy, zmq or other heavy library, and open no
  device.

PLUGIN-3, claims
: A spec's claims are true: its factory, options and probe can be loaded, and its capabilities and costs are
  stated. A name that does not exist is an error when the plugin is judged, not when an operator uses it.

PLUGIN-4, documented
: Each of its offers has a summary, every option has a help text, and the distribution has a readme that
  names all offers.
"""


def _read(written: str) -> dict[str, Law]:
    laws, section = {}, ""
    for paragraph in written.strip().split("\n\n"):
        if paragraph.startswith("## "):
            section = paragraph.removeprefix("## ")
        else:
            heading, text = paragraph.split("\n: ")
            id_, title = heading.split(", ", 1)
            laws[id_] = Law(id_, title, " ".join(text.split()), section)
    return laws


LAWS: Final = _read(_WRITTEN)
"""The laws by id, in the order of the page."""


PROGRAM: Final = "python -m kvplug_testing.laws"
"""What prints laws; see :func:`main`."""


def selected(names: Iterable[str]) -> tuple[str, ...]:
    """The ids of the named laws, in the order of the page. A name is an id, or the kind of several laws
    (``"PIPE"``), in upper or lower case.

    Raises:
        LookupError: a name is neither; the message lists those that are like it.
    """
    found: set[str] = set()
    for name in names:
        wanted = name.strip().upper()
        ids = {id_ for id_ in LAWS if wanted in (id_, _kind(id_))}
        if not ids:
            kinds = list(dict.fromkeys(map(_kind, LAWS)))
            near = difflib.get_close_matches(wanted, [*kinds, *LAWS], n=4)
            hint = f"; did you mean {listed(near)}?" if near else "."
            raise LookupError(f"there is no law {name!r}{hint} Kinds of laws are {', '.join(kinds)}")
        found |= ids
    return tuple(id_ for id_ in LAWS if id_ in found)


def _kind(id_: str) -> str:
    return id_.rpartition("-")[0]


def with_laws(page: str) -> str:
    """The page with the laws updated; the text before and after them is kept.

    Raises:
        ValueError: the page lacks the marker lines around the laws.
    """
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the laws stand between the lines {_BEGIN!r} and {_END!r}, which this page lacks")
    sections = groupby(LAWS.values(), lambda law: law.section)
    made = "".join(f"\n## {section}\n\n{_as_definitions(laws)}" for section, laws in sections)
    return f"{before}{_BEGIN}{made}\n{_END}{after}"


def _as_definitions(laws: Iterable[Law]) -> str:
    """Markdown definition lists, each with a link target."""

    def indented(text: str) -> str:
        return textwrap.fill(
            text, _PAGE_WIDTH, initial_indent=": ", subsequent_indent="  ", break_on_hyphens=False
        )

    return "\n".join(f"({law.id})=\n{law.id}, {law.title}\n{indented(law.text)}\n" for law in laws)


def main(arguments: Sequence[str]) -> None:
    """The program.

    Raises:
        SystemExit: a name is unknown; the message says which are near.
    """
    match arguments:
        case ["--page", path]:
            page = Path(path)
            page.write_text(with_laws(page.read_text()))
        case ids:
            try:
                wanted = selected(ids)
            except LookupError as e:
                sys.exit(str(e))
            sys.stdout.writelines(f"{LAWS[id_].quoted}\n" for id_ in wanted or LAWS)


if __name__ == "__main__":
    main(sys.argv[1:])
