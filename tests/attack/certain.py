"""What is certain of versions between two changes of their model, and calls that are held against it afterwards."""

from __future__ import annotations

import array
import bisect
import collections
import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call that was answered, or refused because its version is not there.

    Attributes:
        begin: ``time.monotonic`` before it was sent; the clocks of all processes of a machine agree.
        end: after it had ended.
        model: which it named.
        version: which answered, or was asked for and is not there.
        answered: whether it was.
    """

    begin: float
    end: float
    model: str
    version: int
    answered: bool


class Calls:
    """Calls by what they say, eight bytes a time."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int, bool], array.array[float]] = {}

    def add(self, calls: Iterable[Call]) -> None:
        """Remember ``calls``."""
        for call in calls:
            key = call.model, call.version, call.answered
            self._times.setdefault(key, array.array("d")).extend((call.begin, call.end))

    def times(self) -> Iterable[tuple[str, int, bool, Iterable[tuple[float, float]]]]:
        """Model, version, whether it was answered, and the begins and ends of such calls."""
        for (model, version, answered), times in self._times.items():
            yield model, version, answered, zip(times[::2], times[1::2], strict=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    begin: float
    end: float
    there: bool


class Certain:
    """When which version was there for certain, or was not.  Any thread.

    Whoever changes a model says so before (`end`), and afterwards what holds until the next change (`begin`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[float, bool, Sequence[int]]] = {}
        self._spans: dict[tuple[str, int], list[_Span]] = collections.defaultdict(list)

    def begin(self, model: str, versions: Sequence[int], time_s: float, *, there: bool) -> None:
        """``versions`` of ``model`` are there, or not, from ``time_s`` on."""
        with self._lock:
            self._open[model] = time_s, there, versions

    def end(self, model: str, time_s: float) -> None:
        """Nothing is certain of ``model`` from ``time_s`` on."""
        with self._lock:
            begin, there, versions = self._open.pop(model, (time_s, False, ()))
            if begin < time_s:
                for version in versions:
                    self._spans[model, version].append(_Span(begin, time_s, there))

    def faults(self, calls: Calls) -> tuple[int, Mapping[str, int]]:
        """How many of ``calls`` lie within what was certain, and how often they ended otherwise."""
        held, faults = 0, collections.Counter[str]()
        for model, version, answered, times in calls.times():
            spans = sorted(self._spans.get((model, version), ()), key=lambda span: span.begin)
            begins = [span.begin for span in spans]
            for begin, end in times:
                at = bisect.bisect_right(begins, begin) - 1
                if at < 0 or end > spans[at].end:
                    continue
                held += 1
                if answered != spans[at].there:
                    was = (
                        "answered when it was not loaded"
                        if answered
                        else "refused when it was loaded"
                    )
                    faults[f"version {version} of {model} was {was}"] += 1
        return held, faults
