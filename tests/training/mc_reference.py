"""A managed collision map as a list of entries, an id at a time: what the modules are held against."""

from collections import Counter

from tessera.training.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
)

POLICIES = {
    LFU_EvictionPolicy: "lfu",
    LRU_EvictionPolicy: "lru",
    DistanceLFU_EvictionPolicy: "distance",
}


class MapInADictionary:
    """Rows ``first`` to ``first + size - 1``, of which the last is for ids without one.

    ``kept`` says which ids of a ``Counter`` are counted; None: all.
    """

    def __init__(self, size, policy, interval=1, kept=None, first=0):
        self.size, self.unknown = size, first + size - 1
        self._policy, self._interval, self._kept = policy, interval, kept
        self._step, self._history = 0, []
        # Sorted by id, rows without an id at the end.
        self._entries = [
            {"id": None, "row": first + row, "count": 0, "last": 0} for row in range(size - 1)
        ]

    def rows(self, ids):
        row_of = {entry["id"]: entry["row"] for entry in self._entries if entry["id"] is not None}
        return [row_of.get(id_, self.unknown) for id_ in ids]

    def open_slots(self):
        return sum(entry["id"] is None for entry in self._entries)

    def _score(self, entry):
        if self._policy == "lfu":
            return entry["count"]
        if self._policy == "lru":
            return entry["last"]
        return entry["count"] / (self._step - entry["last"] + 1)

    def train(self, ids):
        """Count the ids of a step; the rows that got another id, None if it was not the time."""
        self._step += 1
        self._history += [(id_, self._step) for id_ in ids]
        if self._step % self._interval:
            return None
        counts = Counter(id_ for id_, _ in self._history)
        counted = set(counts) if self._kept is None or not counts else self._kept(counts)
        last = dict(self._history)
        self._history = []
        new = {id_: {"id": id_, "count": counts[id_], "last": last[id_]} for id_ in sorted(counted)}
        for entry in self._entries:
            if entry["id"] in new:
                fresh = new.pop(entry["id"])
                entry["count"] += fresh["count"]
                entry["last"] = fresh["last"]
        # sorted() keeps the order of equals: those with a row first, then the more frequent ids.
        candidates = sorted(new.values(), key=lambda entry: -entry["count"])
        ranked = sorted([*self._entries, *candidates], key=lambda entry: -self._score(entry))
        stay, go = ranked[: self.size - 1], ranked[self.size - 1 :]
        evicted = [entry["row"] for entry in go if "row" in entry]
        rows = iter(evicted)
        for entry in stay:
            if "row" not in entry:
                entry["row"] = next(rows)
        kept = [entry for entry in self._entries if any(entry is other for other in stay)]
        came = [entry for entry in stay if not any(entry is other for other in self._entries)]
        self._entries = sorted(
            [*kept, *came], key=lambda entry: (entry["id"] is None, entry["id"] or 0)
        )
        return evicted


_WORD = 2**64 - 1


def _turned(word, bits):
    return (word << bits | word >> (64 - bits)) & _WORD


def _mixed(word):
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
    return word ^ word >> 33


def murmur(id_):
    """MurmurHash3_x64_128 of the words ``id_`` and 0, as its author published it; both words of it, xor."""
    first = second = 0
    word = (id_ & _WORD) * 0x87C37B91114253D5 & _WORD
    first ^= _turned(word, 31) * 0x4CF5AD432745937F & _WORD
    first = (_turned(first, 27) + second) * 5 + 0x52DCE729 & _WORD
    second = (_turned(second, 31) + first) * 5 + 0x38495AB5 & _WORD
    first, second = first ^ 16, second ^ 16
    first = first + second & _WORD
    second = second + first & _WORD
    first, second = _mixed(first), _mixed(second)
    first = first + second & _WORD
    return first ^ second + first & _WORD


class PlacesInAList:
    """A hash-based map as a list of rows, an id at a time.

    ``buckets`` are (first row, rows); ``policy`` is None, "ttl" or "lru".
    """

    def __init__(self, buckets, probes, bucket_of, policy=None, reserved=0):
        self._buckets, self._probes, self._bucket_of = buckets, probes, bucket_of
        self._policy, self._reserved = policy, reserved
        self.rows = {}  # row -> [id, the hour until which it stays]

    def _looks_at(self, id_):
        first, size = self._buckets[self._bucket_of(id_)]
        size -= self._reserved
        count = min(self._probes, size)
        return [first + (murmur(id_) + probe) % size for probe in range(count)]

    def row(self, id_):
        for row in self._looks_at(id_):
            if id_ != -1 and self.rows.get(row, [None])[0] == id_:
                return row
        if not self._reserved:
            return self._looks_at(id_)[0]
        first, size = self._buckets[self._bucket_of(id_)]
        return first + size - self._reserved + murmur(id_) % self._reserved

    def knows(self, id_):
        return self.rows.get(self.row(id_), [None])[0] == id_ != -1

    def train(self, ids, now=0, ttl=0):
        """Give new ids rows; returns the rows that other ids had, ascending."""
        evicted = []
        for id_ in ids:
            if self.knows(id_):
                row = self.row(id_)
                self.rows[row][1] = max(self.rows[row][1], now + ttl)
        for id_ in dict.fromkeys(ids):
            if id_ == -1 or self.knows(id_):
                continue
            open_ = [row for row in self._looks_at(id_) if row not in self.rows]
            expired = [
                row
                for row in self._looks_at(id_)
                if self._policy and row in self.rows and self.rows[row][1] < now
            ]
            if self._policy == "lru":  # sorted() keeps the order of equals
                choice = [*open_, *sorted(expired, key=lambda row: self.rows[row][1])]
            else:
                choice = [row for row in self._looks_at(id_) if row in open_ or row in expired]
            for row in choice[:1]:
                if row in self.rows:
                    evicted.append(row)
                self.rows[row] = [id_, now + ttl]
        return sorted(set(evicted))
