"""How many calls a second a token allows: the generic cell rate algorithm, in memory that processes may share.

Each call moves a token's "full until" ``1 / rate`` seconds on, from now where it lies in the past.  A call is refused
while that would lie more than a second ahead (or one call, where a second has less): so a second's worth of calls may
come at once, and on average there are no more than the rate.  cpp_server/src/security/rate.h has the same rule.

An entry whose "full until" has passed says nothing any more, so that any token may take its place.
"""

from __future__ import annotations

import mmap

from tessera.serving.server.security.token_file import Token

_ENTRIES = 1 << 16
_TRIES = 16
_BURST_NS = 1_000_000_000


def next_full_until(full_until_ns: int, now_ns: int, calls_per_s: float) -> int | None:
    """What a call at ``now_ns`` makes of a token's "full until", both of one clock; None: it is refused."""
    cost_ns = int(1e9 / calls_per_s)
    after_ns = max(full_until_ns, now_ns) + cost_ns
    return after_ns if after_ns - now_ns <= max(_BURST_NS, cost_ns) else None


class Rates:
    """Counts calls by token.

    Made before a process forks, it is shared by its children, which then bound a token's calls together.  They
    take no lock: two calls within the same microsecond may count as one.
    """

    def __init__(self) -> None:
        # Anonymous memory is zero, and takes room only where it is written.
        memory = memoryview(mmap.mmap(-1, _ENTRIES * 16))
        self._keys = memory[: _ENTRIES * 8].cast("Q")
        self._full_until_ns = memory[_ENTRIES * 8 :].cast("q")

    def take(self, token: Token, now_ns: int) -> bool:
        """Count a call at ``now_ns`` of the monotonic clock; False: it is one too many."""
        if token.calls_per_s == 0:
            return True
        key = int.from_bytes(token.digest[:8], "little")
        entry = self._entry(key, now_ns)
        so_far_ns = self._full_until_ns[entry] if self._keys[entry] == key else 0
        after_ns = next_full_until(so_far_ns, now_ns, token.calls_per_s)
        if after_ns is None:
            return False
        self._keys[entry] = key
        self._full_until_ns[entry] = after_ns
        return True

    def _entry(self, key: int, now_ns: int) -> int:
        """Where ``key`` is, or may be: its own entry, else one that says nothing any more, else its last."""
        places = [(key + step) % _ENTRIES for step in range(_TRIES)]
        for place in places:
            if self._keys[place] == key:
                return place
        free = (place for place in places if self._full_until_ns[place] <= now_ns)
        return next(free, places[-1])
