"""The budget of one prefix, which all of its clients share.

The server records the cost and the last use of each page. A page is recorded before its values are written,
so that the values of a client that dies are counted, and evicted like those of any unused page. Pages to
evict are first marked as *doomed*, and still count until a client has removed their values. So all existing
values are counted at any moment, whichever client dies. Each eviction frees a 64th of the budget, so that
concurrent writers do not repeatedly take each other's room. The pages that a client writes at the same time
take no more than that. A page that was evicted before it is written is recorded again, after its values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import attrs

from kvplug_redis.connection import Client, Command, checked

_RESERVE: Final = """
local use, costs, total_key, doomed = unpack(KEYS)
local budget, ttl = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local total = tonumber(redis.call('GET', total_key) or '') or math.huge
local was_empty = redis.call('HLEN', costs) == 0
-- another program or the server's policy has changed or removed a record, or clients differ in size
if total > budget or total < 0 or was_empty then
    total = 0
    for _, each in ipairs(redis.call('HVALS', costs)) do total = total + (tonumber(each) or 0) end
    redis.call('SET', total_key, total)
end
if not redis.call('ZRANGE', use, 0, 0)[1] then
    for _, each in ipairs(redis.call('HKEYS', costs)) do redis.call('ZADD', use, now, each) end
end
if ttl > 0 then
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', use, '-inf', now - ttl, 'LIMIT', 0, 256)) do
        total = total - tonumber(redis.call('HGET', costs, old) or '0')
        redis.call('HDEL', costs, old)
        redis.call('ZREM', use, old)
    end
    redis.call('SET', total_key, total)
end
local made, mine, wanted, victims = {}, {}, 0, {}
for i = 3, #ARGV, 2 do
    local member, cost = ARGV[i], tonumber(ARGV[i + 1])
    local is_made = 0
    if redis.call('HEXISTS', doomed, member) == 1 then
        victims[#victims + 1] = member
    elseif redis.call('HEXISTS', costs, member) == 1 then
        redis.call('ZADD', use, now, member)
        is_made = 1
    elseif total + cost <= budget and wanted == 0 then
        redis.call('HSET', costs, member, cost)
        redis.call('ZADD', use, now, member)
        total = redis.call('INCRBY', total_key, cost)
        is_made = 1
    elseif wanted == 0 then
        wanted = cost -- the other pages wait until there is room for this one
    end
    made[#made + 1] = is_made
    mine[member] = is_made == 1
end
if wanted > 0 then
    victims = redis.call('HKEYS', doomed)
    local freed, goal = 0, budget - math.floor(budget / 64)
    for _, victim in ipairs(victims) do freed = freed + tonumber(redis.call('HGET', costs, victim) or '0') end
    while total - freed + wanted > goal and #victims < 1024 do
        local oldest = redis.call('ZRANGE', use, 0, 0)[1]
        if not oldest or mine[oldest] then break end
        redis.call('ZREM', use, oldest)
        redis.call('HSET', doomed, oldest, 1)
        freed = freed + tonumber(redis.call('HGET', costs, oldest) or '0')
        victims[#victims + 1] = oldest
    end
end
return {made, redis.call('HLEN', costs), total, victims, was_empty and 1 or 0}
"""

_RELEASE: Final = """
local use, costs, total_key, doomed = unpack(KEYS)
local evicted = 0
for i = 2, #ARGV do
    local member = ARGV[i]
    -- a page that was evicted may have been written again meanwhile
    if ARGV[1] == '0' or redis.call('HEXISTS', doomed, member) == 1 then
        local cost = redis.call('HGET', costs, member)
        if cost then
            -- these first: a full server accepts them, and lets a script finish that has written
            redis.call('HDEL', costs, member)
            redis.call('DECRBY', total_key, cost)
            evicted = evicted + 1
        end
        redis.call('ZREM', use, member)
        redis.call('HDEL', doomed, member)
    end
end
return {evicted, redis.call('HLEN', costs), tonumber(redis.call('GET', total_key) or '0')}
"""

_WRITTEN: Final = """
local use, costs, total_key, doomed = unpack(KEYS)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #ARGV, 2 do
    local member, cost = ARGV[i], ARGV[i + 1]
    local was_doomed = redis.call('HDEL', doomed, member) == 1
    local is_new = redis.call('HEXISTS', costs, member) == 0
    if was_doomed or is_new then redis.call('ZADD', use, now, member) end
    if is_new then
        redis.call('HSET', costs, member, cost)
        redis.call('INCRBY', total_key, cost)
    end
end
return 1
"""

_TOUCH: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, member in ipairs(ARGV) do redis.call('ZADD', KEYS[1], 'XX', now, member) end
return 1
"""

_DROP: Final = """
if redis.call('GETRANGE', KEYS[1], ARGV[1], ARGV[2]) == ARGV[3] then return redis.call('UNLINK', KEYS[1]) end
return 0
"""


@attrs.frozen
class Reserved:
    """The answer to a reservation."""

    made: list[bool]
    """For each page, whether there is room for it. A page with room must be written or released."""
    victims: list[bytes]
    """Members whose values must be removed to make room for the others."""
    was_empty: bool = False
    """Whether no page was recorded."""
    error: Exception | None = None
    """Why nothing was reserved."""


class Budget:
    """The usage and the limit of one prefix's pages. Thread-safe.

    A member is a page's key (32 bytes), its tag (8), and the number of its pieces as text.
    """

    SHARE: ClassVar[int] = 64
    """The part of the budget that one eviction frees."""

    def __init__(self, client: Client, names: Sequence[bytes], size: int, ttl_s: float | None) -> None:
        self._client = client
        self._names = list(names)
        self.size = size
        self._ttl_ms = 0 if ttl_s is None else int(ttl_s * 1000)
        self.num_pages = self.used_bytes = self.num_evicted = 0
        """The server's last figures."""
        self._lock = threading.Lock()
        """Held during calls that change the budget, so that their results stay in the server's order."""
        self.version = 0
        """Changes with each such call."""

    def reserve(
        self, costs: Sequence[tuple[bytes, int]], also: Sequence[Command] = ()
    ) -> tuple[Reserved, list[Any]]:
        """Record pages that will be written, or were. ``costs``: members with their bytes.

        Returns also the replies to the commands ``also``, which are sent with it.
        """
        arguments = [each for pair in costs for each in pair]
        script = Command.script(_RESERVE, self._names, self.size, self._ttl_ms, *arguments)
        with self._lock:
            *others, reply = self._client.run([*also, script])
            if isinstance(reply, Exception):
                return Reserved([False] * len(costs), [], error=reply), others
            made, count, total, victims, was_empty = reply
            self.num_pages, self.used_bytes, self.version = count, total, self.version + 1
        return Reserved([bool(each) for each in made], victims, bool(was_empty)), others

    def release(self, members: Sequence[bytes], *, evicted: bool = False) -> None:
        """Remove pages whose values are gone."""
        if not members:
            return
        with self._lock:
            script = Command.script(_RELEASE, self._names, int(evicted), *members)
            (reply,) = checked(self._client.run([script]))
            count, self.num_pages, self.used_bytes = reply
            self.num_evicted += count if evicted else 0
            self.version += 1

    def written(self, costs: Sequence[tuple[bytes, int]]) -> Command:
        """A command that records pages again, after their values, if another client has evicted them since
        :meth:`reserve`."""
        return Command.script(_WRITTEN, self._names, *(each for pair in costs for each in pair))

    def use_of(self, members: Sequence[bytes]) -> Command:
        """A command that records a use of these pages."""
        return Command.script(_TOUCH, self._names, *members)

    def figures(self) -> list[Command]:
        """Commands that query the usage. Pass their replies to :meth:`note`."""
        return [Command.of(b"HLEN", self._names[1]), Command.of(b"GET", self._names[2])]

    def note(self, answers: Sequence[Any], version: int) -> None:
        """``version``: the one before the pipeline. If it has changed, newer figures are known."""
        with self._lock:
            if version == self.version:
                with contextlib.suppress(TypeError, ValueError):  # another program has changed the keys
                    self.num_pages, self.used_bytes = int(answers[0]), int(answers[1] or 0)


def drop_manifest(name: bytes, tag: bytes, at: int) -> Command:
    """A command that removes a manifest if it has this tag at offset ``at``."""
    return Command.script(_DROP, [name], at, at + len(tag) - 1, tag)
