"""The budget of one prefix, which all of its clients keep together.

The server notes for each page what it costs, and when it was used. A page is noted before its values are
written, so that what a client that dies leaves behind is counted, and given up like any unused page. Pages
that make room are *doomed* first, and still count; they stop counting when a client has removed their values.
So values that are there are counted at any moment, whoever dies. A 64th of the budget is freed at once, so
that clients which write at the same time do not take each other's room again and again."""

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
if total > budget or total < 0 then -- another program has changed it, or clients give other sizes
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
        -- first what a full server takes as well: it lets a script finish that has written
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
    """Members whose values make room, if it is not."""


class Budget:
    """What the pages of one prefix use, and may use. Threads may share it.

    A member is the key of a page (32 bytes), its tag (8), and the number of its pieces in text.
    """

    def __init__(
        self, client: Callable[[], Any], names: Sequence[str], size: int, ttl_s: float | None
    ) -> None:
        """``client``: made when it is first needed."""
        self._client = client
        self._names = list(names)
        self.size = size
        self._ttl_ms = 0 if ttl_s is None else int(ttl_s * 1000)
        self.num_pages = self.used_bytes = self.num_evicted = 0
        """As the server said last."""
        self._lock = threading.Lock()
        """Held during calls that change it, so that their answers are taken over in the server's order."""
        self.version = 0
        """Changes with each of them."""

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._client().eval(script, len(self._names), *self._names, *arguments)

    def reserve(self, member: bytes, cost: int) -> Reserved:
        """Note a page that will be written, or was."""
        with self._lock:
            made, count, total, victims = self._run(_RESERVE, member, cost, self.size, self._ttl_ms)
            self.num_pages, self.used_bytes, self.version = count, total, self.version + 1
        return Reserved(bool(made), victims)

    def release(self, members: Sequence[bytes], *, evicted: bool = False) -> None:
        """The values of these pages are gone."""
        if not members:
            return
        with self._lock:
            count, self.num_pages, self.used_bytes = self._run(_RELEASE, *members)
            self.num_evicted += count if evicted else 0
            self.version += 1

    def touch(self, members: Sequence[bytes]) -> None:
        """These pages were used."""
        if members:
            self._run(_TOUCH, *members)

    def refresh(self, pipe: Any) -> None:
        """Ask what is used, as the last two commands of a pipeline; :meth:`note` takes the answers."""
        pipe.hlen(self._names[1])
        pipe.get(self._names[2])

    def note(self, answers: Sequence[Any], version: int) -> None:
        """``version``: that before the pipeline. What has changed since is newer."""
        with self._lock:
            if version == self.version:
                with contextlib.suppress(TypeError, ValueError):  # another program has changed the keys
                    self.num_pages, self.used_bytes = int(answers[0]), int(answers[1] or 0)


def drop_manifest(client: Any, name: bytes, tag: bytes, at: int) -> None:
    """Remove a manifest if it has that tag, whose first byte is number ``at``."""
    client.eval(_DROP, 1, name, at, at + len(tag) - 1, tag)
