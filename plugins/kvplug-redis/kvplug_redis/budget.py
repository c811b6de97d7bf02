"""The budget of one prefix, which all of its clients share.

The server records the cost and the last use of each page. A page is recorded before its values are written,
so that the values of a client that dies are counted, and evicted like those of any unused page. Pages to
evict are first marked as *doomed*, and still count until a client has removed their values. So all existing
values are counted at any moment, whichever client dies. Each eviction frees a 64th of the budget, so that
concurrent writers do not repeatedly take each other's room."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

_RESERVE: Final = """
local use, costs, total_key, doomed = unpack(KEYS)
local member, cost, budget, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local total = tonumber(redis.call('GET', total_key) or '0') or math.huge
if total > budget or total < 0 then -- another program changed it, or clients differ in size
    total = 0
    for _, each in ipairs(redis.call('HVALS', costs)) do total = total + (tonumber(each) or 0) end
    redis.call('SET', total_key, total)
end
if ttl > 0 then
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', use, '-inf', now - ttl, 'LIMIT', 0, 256)) do
        total = total - tonumber(redis.call('HGET', costs, old) or '0')
        redis.call('HDEL', costs, old)
        redis.call('ZREM', use, old)
    end
    redis.call('SET', total_key, total)
end
local victims = {}
if redis.call('HEXISTS', doomed, member) == 1 then
    victims = {member}
elseif redis.call('HEXISTS', costs, member) == 1 then
    redis.call('ZADD', use, now, member)
    return {1, redis.call('HLEN', costs), total, victims}
elseif total + cost <= budget then
    redis.call('HSET', costs, member, cost)
    redis.call('ZADD', use, now, member)
    total = redis.call('INCRBY', total_key, cost)
    return {1, redis.call('HLEN', costs), total, victims}
else
    victims = redis.call('HKEYS', doomed)
    local freed, goal = 0, budget - math.floor(budget / 64)
    for _, victim in ipairs(victims) do freed = freed + tonumber(redis.call('HGET', costs, victim) or '0') end
    while total - freed + cost > goal and #victims < 1024 do
        local oldest = redis.call('ZRANGE', use, 0, 0)[1]
        if not oldest then break end
        redis.call('ZREM', use, oldest)
        redis.call('HSET', doomed, oldest, 1)
        freed = freed + tonumber(redis.call('HGET', costs, oldest) or '0')
        victims[#victims + 1] = oldest
    end
end
return {0, redis.call('HLEN', costs), total, victims}
"""

_RELEASE: Final = """
local use, costs, total_key, doomed = unpack(KEYS)
local evicted = 0
for _, member in ipairs(ARGV) do
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
return {evicted, redis.call('HLEN', costs), tonumber(redis.call('GET', total_key) or '0')}
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

    is_made: bool
    victims: list[bytes]
    """Members whose values must be removed to make room, if it is not."""


class Budget:
    """The usage and the limit of one prefix's pages. Thread-safe.

    A member is a page's key (32 bytes), its tag (8), and the number of its pieces as text.
    """

    def __init__(
        self, client: Callable[[], Any], names: Sequence[str], size: int, ttl_s: float | None
    ) -> None:
        """``client``: returns the client, when it is first needed."""
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

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._client().eval(script, len(self._names), *self._names, *arguments)

    def reserve(self, member: bytes, cost: int) -> Reserved:
        """Record a page that will be written, or was."""
        with self._lock:
            made, count, total, victims = self._run(_RESERVE, member, cost, self.size, self._ttl_ms)
            self.num_pages, self.used_bytes, self.version = count, total, self.version + 1
        return Reserved(bool(made), victims)

    def release(self, members: Sequence[bytes], *, evicted: bool = False) -> None:
        """Remove pages whose values are gone."""
        if not members:
            return
        with self._lock:
            count, self.num_pages, self.used_bytes = self._run(_RELEASE, *members)
            self.num_evicted += count if evicted else 0
            self.version += 1

    def touch(self, members: Sequence[bytes]) -> None:
        """Record a use of these pages."""
        if members:
            self._run(_TOUCH, *members)

    def refresh(self, pipe: Any) -> None:
        """Query the usage with two commands at the end of a pipeline. Pass their results to :meth:`note`."""
        pipe.hlen(self._names[1])
        pipe.get(self._names[2])

    def note(self, answers: Sequence[Any], version: int) -> None:
        """``version``: the one before the pipeline. If it has changed, newer figures are known."""
        with self._lock:
            if version == self.version:
                with contextlib.suppress(TypeError, ValueError):  # another program has changed the keys
                    self.num_pages, self.used_bytes = int(answers[0]), int(answers[1] or 0)


def drop_manifest(client: Any, name: bytes, tag: bytes, at: int) -> None:
    """Remove a manifest if it has this tag at offset ``at``."""
    client.eval(_DROP, 1, name, at, at + len(tag) - 1, tag)
