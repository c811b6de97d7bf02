"""The laws by their ids: what a test names, and a failure quotes. docs/reference/laws.md is made from here.

``python -m kvplug_testing.laws PIPE-5 PIPE-6`` prints those; without an id, all of them.
``python -m kvplug_testing.laws --page docs/reference/laws.md`` writes them anew into the page.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import attrs

_WIDTH = 100
"""Columns of a law that is printed."""
_PAGE_WIDTH = 118
"""Columns of a law on the page."""
_BEGIN = "<!-- Laws, made of laws.py: `python -m kvplug_testing.laws --page docs/reference/laws.md`. -->\n"
_END = "<!-- The end of the laws. -->\n"


@attrs.frozen
class Law:
    """One law."""

    id: str
    """Also the anchor, in docs/reference/laws.md."""
    title: str
    text: str
    """What it says, in Markdown, on one line."""
    section: str
    """The heading it stands under."""

    @property
    def page(self) -> str:
        """Where it is written out, within the documentation."""
        return f"docs/reference/laws.md#{self.id.lower()}"

    @property
    def quoted(self) -> str:
        """Id, title and page, and below them what it says."""
        lines = textwrap.wrap(self.text, _WIDTH, break_on_hyphens=False)
        return f"law {self}: see {self.page}\n" + "\n".join(f"    {line}" for line in lines)

    def __str__(self) -> str:
        return f"{self.id} ({self.title})"


_WRITTEN = """
## Everything with an end

ALL-1, closing
: `close()` is polite: within its timeout it lets finish what was started. `abort()` ends at once and never
  blocks. Both may be called twice. Afterwards every call raises `ClosedError`. A communicator's `destroy()`
  is both.

ALL-2, a dead peer
: When the process at the other end dies, every call raises `PeerGoneError`, one that is already blocked too.
  Messages that had wholly arrived may still be received (a queue's reader always gets them); a part of one
  never is. That one reader died is no error for the writer of a queue.

ALL-3, a silent peer
: A process on this host that is stopped or busy is alive: calls end with `TimeoutError`. Where its life
  cannot be seen (another host, another pid namespace), silence of `heartbeat_timeout_s` counts as death. The
  connection is fenced then, and blocks that were lent to it stay in quarantine.

ALL-4, time
: Every call that can block takes `timeout`: seconds, or `None` for ever. Where nothing is said, the config's
  `timeout_s` applies, which is finite. `TimeoutError` says what was waited for.

ALL-5, every transfer ends
: In success or in an error, also when the peer is killed or its host disappears. A failure is reported to
  the caller that waits, not only logged.

ALL-6, forks
: In a forked child whatever was open is closed: its calls raise `ClosedError`, and the child holds none of
  its descriptors. The parent's go on working.

ALL-7, nothing left behind
: When everything of it is closed, a process holds no descriptor, thread, child, socket name or shared memory
  that it did not hold before, and no more memory however often that is repeated. Nothing of a killed process
  outlives it.

## Endpoints

END-1, two verbs
: `listen()` gives something with a contact, a short opaque string; `connect(contact)` gives a pipe. A
  transport implements no other way of meeting.

END-2, coming and going
: Peers arrive and leave while others work, and do not disturb them.

## Pipe

PIPE-1, what arrives
: Each tensor arrives whole, once, in the order of sending, with its shape, its dtype and its bits: every
  dtype of torch (bfloat16, the float8 kinds and bool among them), tensors without dimensions, without
  elements, and not contiguous ones. `None` is a message too. `send_blocks` sends the named rows of its
  views as one tensor, in the order they were named in.

PIPE-2, sending
: `send_tensor` returns a `Transfer` at once, until `max_in_flight_bytes` are unsent; then it blocks. A
  message larger than the limit passes alone. When it raises `TimeoutError` nothing was queued.

PIPE-3, what is held
: With the receiver stopped the pipe holds no more than the limit and one message.

PIPE-4, whose memory
: The pipe keeps the tensor alive. Its content belongs to the pipe until `transfer.done()`; then the caller
  may overwrite it. Done means that much, not that the peer has read it.

PIPE-5, receiving into memory
: `recv_tensor(out=...)` fills `out`, contiguous or not. If the message's shape or dtype is another one, or
  the message is `None`, it raises `TensorMismatchError` and the message stays. `recv_blocks` fills the named
  rows of its views, and no others.

PIPE-6, a receive that runs out of time
: Before the first byte nothing is lost. After it the next call goes on with the same message, or the pipe is
  broken and says so. A message is never skipped.

PIPE-7, threads
: One thread sends while one receives. Another one in the same direction gets `BusyError`, never a mixed
  stream.

## Message queue

QUEUE-1, every reader, every message
: Each reader named in the handle gets each message once, in order, from the first one on, or an error that
  says how many it lost. Nothing is dropped in silence, on a network neither.

QUEUE-2, dead readers
: A reader that died is evicted, named and reported. The others go on.

QUEUE-3, waiting
: A writer that has to wait names the readers it waits for: rank, process, and how far behind.

QUEUE-4, idling
: A reader that waits costs next to no processor time.

QUEUE-5, chunks
: As many messages lie unread by the slowest reader as there are chunks, no more; then the writer waits, and a
  call that ran out of time has sent nothing. A chunk is written and read in place, and comes back when its
  block ends, by an exception too: what the writer's block left that way was never sent, what the reader's
  left has been read.

## Device communicator

COMM-1, what a collective gives
: Every rank gets what the collective's documentation says, whatever order the ranks come in: the sum of all
  inputs, their concatenation in the order of ranks along any dimension, or its rank's part of either. With
  one rank that is its own input.

COMM-2, who takes part
: A collective ends when every rank of the group has called it, in the same order of calls. A rank that does
  not come, or has died, is named in the `TimeoutError` or `PeerGoneError` of all the others, which are not
  left waiting. After either the communicator is broken, since ranks would be in different calls: later ones
  raise `TransportError` at once, and a rank that comes late gets an error, never a result. Where ranks do not
  compare what they are about to do, one that only gives something may be done before the others come.

COMM-3, what is refused
: Tensors that do not fit together (dtype, shape, device, sizes that do not add up, a dimension that is not
  there, a rank that is not of the group) are refused with an error that says what was given and what was
  wanted, at every rank, and the communicator stays usable. One whose ranks do not compare what they are about
  to do (`compares`) refuses only what is wrong at a rank by itself. Where a batch that does not fit has more
  than one other rank, those may have begun, and the communicator is broken; so it is where a rank sends or
  receives while more than one other is in a collective.

COMM-4, experts
: With an all-to-all manager `dispatch` brings every rank the tokens of all, in the order of ranks and
  whatever their numbers, those of ranks that share them once, and extra tensors with them; `combine` gives
  each rank its own tokens' rows of the sum of all ranks', whole. Without one they change nothing.

COMM-5, sleep
: Between `suspend` and `resume` every call raises `TransportError`; afterwards all is as before. Both may be
  called twice.

## Lookup buffer

LOOKUP-1, the key
: An entry's key is its `extra` bytes and its tokens under the roi. `extra` must be equal. Token ids are
  compared exactly, as integers, whatever a hash said before.

LOOKUP-2, matching
: An entry matches a query when one token sequence is a prefix of the other and not empty. Of several the
  oldest wins. A miss is a miss, never another key's data.

LOOKUP-3, `match`
: The length of the longest prefix that the query shares with any entry that is held, whatever follows in
  either. It never waits; where there is nothing the answer is 0, not an error.

LOOKUP-4, `drop_select`
: Takes the entry out and hands it to one caller. If that caller dies before it has all of it, the entry is
  back. It waits for an entry until its timeout, then raises `TimeoutError`.

LOOKUP-5, room
: `insert` waits for room until its timeout. An entry larger than the whole budget is refused at once, with
  `CapacityError`.

LOOKUP-6, cost
: Finding takes time in proportion to the prompt, not to the number of entries.

LOOKUP-7, `select`
: Reads the entry that shares the longest prefix and leaves it where it is. While it is read it can neither be
  dropped nor evicted. Where nothing shares enough, `EntryGoneError` comes at once.

LOOKUP-8, `clear`
: What was handed to `insert` before is not to be had after it: entries are announced as removed, an insert
  that has not returned raises `EntryGoneError`, and an entry that was lent is not put up again. A reader
  that has it may go on reading.

LOOKUP-9, events
: A listener gets a snapshot of what can be had, and then every change of it, in the order of their numbers
  and without a gap. When a call that changed something returns, every listener has been told.

## Connector

CONN-1, order
: An engine calls the methods in the documented order; a connector may rely on it and says which call broke
  it. Where the order leaves a call's place open, a connector is right wherever it comes.

CONN-2, promises
: Only tokens whose KV can be loaded are promised to the scheduler.

CONN-3, failed loads
: A block that could not be loaded is reported in the same step. The engine then computes it again or fails
  the request, as its policy says. Wrong KV is never used.

CONN-4, lent blocks
: Blocks that a transfer still reads or writes are not used for anything else until `get_finished` names the
  request, or its peer is known to be gone.

CONN-5, named once
: `get_finished` names each request once. One that ended while it was loading in the background is named as
  received and not as sent as well, whatever `request_finished` answered.

CONN-6, steps in flight
: A step may be planned before it is known that a load of the step before has failed. Nothing that such a step
  gathers from those blocks, or computes from them, is stored or sent.

CONN-7, forgetting
: Where `reset_cache` returns true, no request that comes to this engine afterwards loads anything that was
  computed before; other engines load nothing old from it once its next step has run. Where it cannot be made
  so, the answer is false.

CONN-8, figures
: What a connector counts adds up: every transfer that was started is counted once, as done or as failed with
  its reason.

## References to blocks

REF-1, what they carry
: A reference to another engine's blocks carries the engine's id, its epoch (which changes with each start),
  the lease and the request's generation.

REF-2, through strangers' hands
: One that travels through a client's request carries a ticket: a keyed hash with an expiry over all of it. A
  stale, forged or out-of-range one is a miss with a counted reason, and nothing is dialled.

## Plugins

PLUGIN-1, being found
: A plugin states its API as a literal, is found through one entry point, loads on its own, and offers each
  name once.

PLUGIN-2, light to load
: Its entry point, options and probes import no torch, numpy, zmq or other heavy library, and open no device.

PLUGIN-3, claims
: What a spec claims is what is there: its factory, options and probe load, its capabilities and costs are
  stated, and a name that is not there is an error when the plugin is judged, not when an operator uses it.

PLUGIN-4, documented
: Everything that it offers has a summary, every option has a help text, and the distribution has a readme
  that names what is offered.
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
"""By id, in the order of the page."""


def with_laws(page: str) -> str:
    """The page with the laws as they are here; what stands before and after them is kept.

    Raises:
        ValueError: the page has no place for laws.
    """
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the laws stand between the lines {_BEGIN!r} and {_END!r}, which this page lacks")
    sections = groupby(LAWS.values(), lambda law: law.section)
    made = "".join(f"\n## {section}\n\n{_as_definitions(laws)}" for section, laws in sections)
    return f"{before}{_BEGIN}{made}\n{_END}{after}"


def _as_definitions(laws: Iterable[Law]) -> str:
    """Markdown's definition lists, each with a target for links."""

    def indented(text: str) -> str:
        return textwrap.fill(
            text, _PAGE_WIDTH, initial_indent=": ", subsequent_indent="  ", break_on_hyphens=False
        )

    return "\n".join(f"({law.id})=\n{law.id}, {law.title}\n{indented(law.text)}\n" for law in laws)


def main(arguments: Sequence[str]) -> None:
    """The program.

    Raises:
        SystemExit: an id is no law's; says which there are.
    """
    match arguments:
        case ["--page", path]:
            page = Path(path)
            page.write_text(with_laws(page.read_text()))
        case ids:
            if unknown := [id_ for id_ in ids if id_ not in LAWS]:
                sys.exit(f"no law: {', '.join(unknown)}; these are: {', '.join(LAWS)}")
            sys.stdout.writelines(f"{LAWS[id_].quoted}\n" for id_ in ids or LAWS)


if __name__ == "__main__":
    main(sys.argv[1:])
