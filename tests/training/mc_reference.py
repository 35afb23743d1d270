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
