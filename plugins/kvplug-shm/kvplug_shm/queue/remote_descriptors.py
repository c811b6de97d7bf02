"""The descriptors of a ZeroMQ context, which a forked child has to close by their numbers.

ZeroMQ does not say which descriptors it opens, and its objects cannot be used in a forked child. There are
two sorts. *Signals* last as long as the context and are recorded when they are opened: an eventfd for each
mailbox (of the context, of its two threads, and of each socket), and an epoll set for each thread.
*Connections* come and go: in the child the epoll sets list them, since the set of a thread holds all that the
thread serves.

A number may be another file's by the time of the fork. So a number is closed only if the kernel still shows
the same object for it: the id of an eventfd, the mailbox in an epoll set, the inode of a socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

_EVENTFD_ID: Final = re.compile(r"^eventfd-id:\s*(\d+)", re.M)
_MEMBER: Final = re.compile(r"^tfd:\s*(\d+) events:\s*\w+ data:\s*(\w+)(?:\s+pos:\s*\w+ ino:\s*(\w+))?", re.M)
_UNWATCHED: Final = 2
"""Mailboxes that no thread watches and no socket shows: of the context, and of the monitor's inner socket."""

_opening = threading.Lock()


class ContextDescriptors:
    """Those of one context."""

    def __init__(self) -> None:
        self._mailboxes: dict[int, str] = {}
        """Eventfds: numbers and ids."""
        self._sets: dict[int, Member] = {}
        """Epoll sets: numbers, and the mailbox of the thread."""

    @contextmanager
    def opening(self) -> Iterator[list[int]]:
        """The block makes the context and its sockets, and adds their descriptors (``zmq.FD``) to a list.

        Other threads may open descriptors meanwhile. What is not certainly the context's is left out.
        """
        with _opening:
            before, sockets = _mailboxes(), list[int]()
            yield sockets
            new = {fd: mark for fd, mark in _mailboxes().items() if before.get(fd) != mark}
            sets = {
                fd: member
                for fd in _numbers()
                for member in _members(fd)
                if member.number in new and member.data != member.number  # others use the number as data
            }
        ours = {*sockets, *(member.number for member in sets.values())} & new.keys()
        unwatched = new.keys() - ours
        if len(unwatched) <= _UNWATCHED:
            ours |= unwatched
        else:
            logger.debug("a forked child will keep %d eventfds of ZeroMQ's", _UNWATCHED)
        self._mailboxes.update((fd, new[fd]) for fd in ours)
        self._sets.update(sets)

    def add(self, fd: int) -> None:
        """The descriptor of a socket that was made later."""
        mark = _mailbox(fd)
        if mark is not None:
            self._mailboxes[fd] = mark

    def clear(self) -> None:
        """The context was terminated."""
        self._mailboxes.clear()
        self._sets.clear()

    def close_in_child(self) -> None:
        """In a forked child: close them, and those of all connections."""
        for fd, mailbox in self._sets.items():
            members = _members(fd)
            if mailbox in members:
                for member in members:
                    _close_socket(member)
                os.close(fd)
        for fd, mark in self._mailboxes.items():
            if _mailbox(fd) == mark:
                os.close(fd)
        self.clear()


class Member(NamedTuple):
    """A member of an epoll set."""

    number: int
    data: int
    """A pointer, in ZeroMQ's sets."""
    inode: int


def _numbers() -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd")]


def _mailboxes() -> dict[int, str]:
    """Every eventfd of this process: its number and its id."""
    found = {fd: _mailbox(fd) for fd in _numbers()}
    return {fd: mark for fd, mark in found.items() if mark is not None}


def _mailbox(fd: int) -> str | None:
    """The id of an eventfd, empty before Linux 5.2; ``None``: it is none."""
    return "".join(_EVENTFD_ID.findall(_info(fd))) if _is(fd, "eventfd") else None


def _members(fd: int) -> list[Member]:
    """What an epoll set holds; nothing if it is none."""
    found = _MEMBER.findall(_info(fd)) if _is(fd, "eventpoll") else []
    return [Member(int(number), int(data, 16), int(inode or "0", 16)) for number, data, inode in found]


def _close_socket(member: Member) -> None:
    with contextlib.suppress(OSError):
        here = os.fstat(member.number)
        if stat.S_ISSOCK(here.st_mode) and here.st_ino == member.inode:
            os.close(member.number)


def _is(fd: int, kind: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == f"anon_inode:[{kind}]"
    except OSError:
        return False


def _info(fd: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            return file.read()
    except OSError:  # closed meanwhile
        return ""


def _in_child() -> None:
    global _opening
    _opening = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)
