"""What the simulation is told: a host, what things cost on it, and the load."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.errors import FieldError

MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class UnderLoad:
    """What was found of threads that wake, and of passes, under one load.

    Attributes:
        load: share of the CPUs that the calls need (`Costs.load_on`).
        wake_s: see `Costs`.
        client_wake_s: see `Costs`.
        late_s: see `Costs`.
        slower: see `Costs`.
    """

    load: float
    wake_s: float = 0.0
    client_wake_s: float = 0.0
    late_s: float = 0.0
    slower: float = 1.0

    def __post_init__(self) -> None:
        for name in ("load", "wake_s", "client_wake_s", "late_s"):
            _refuse_unless(name, getattr(self, name), least=0.0)
        _refuse_unless("slower", self.slower, least=1.0)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The threads of a server, the CPUs that they share, and who else uses these.

    Attributes:
        cores: CPUs.
        loops: threads of the network.
        workers: threads that compute batches.
        spares: workers that take part in heavy work alone.
        runs_passes: whether threads of the network compute short batches themselves.
        clients: threads of a client on the same CPUs; 0: callers are elsewhere.
    """

    cores: int
    loops: int
    workers: int
    spares: int = 0
    runs_passes: bool = False
    clients: int = 0

    def __post_init__(self) -> None:
        for name in ("cores", "loops", "workers"):
            if getattr(self, name) < 1:
                raise FieldError(name, getattr(self, name), "give a whole number of at least 1")
        for name in ("spares", "clients"):
            if getattr(self, name) < 0:
                raise FieldError(name, getattr(self, name), "give 0 or more")

    @classmethod
    def of_server(cls, server: str, cores: int, *, clients: int = 0) -> Host:
        """What ``server``, cpp or python, makes of ``cores`` CPUs by its defaults on a CPU model."""
        half = max(1, cores // 2)
        if server == "cpp":
            return cls(
                cores=cores,
                loops=half,
                workers=half,
                spares=cores - half,
                runs_passes=True,
                clients=clients,
            )
        return cls(cores=cores, loops=1, workers=half, clients=clients)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a request, a batch and a thread that wakes cost, in seconds of a CPU.

    Attributes:
        call_s: the server's part of a request outside the pass, half before it and half after it.
        wake_s: each time that a thread of the server begins to run after it had nothing to do, on a CPU that had
            nothing to do either, with what its cold caches cost then; a busy CPU takes it up at its next turn, which
            costs little.
        client_call_s: a client's part of a request, half for sending it and half for the answer.
        client_wake_s: the same of a thread of the client.
        wire_s: what an answer takes beyond that, for which nobody uses a CPU.
        passes: (samples, seconds) of batches, by growing samples; between them, and beyond the last, straight lines.
        spread_s: what passes take beyond those of ``passes``, whatever their size: equally likely values,
            ascending, between which the simulation draws evenly.  One value: all take the same.
        late_share: of the times that a thread of the network or of a client begins to run after it had nothing to do,
            the share in which it begins late, for which nobody uses a CPU: the kernel has put another thread before
            it, or the machine has taken its CPU away.
        late_s: how late it then is on average, exponentially distributed.
        slower: by what passes take longer than ``passes`` says, since the CPUs are busy: they share caches, and
            two of them may be one core's.
        under: what ``wake_s``, ``client_wake_s``, ``late_s`` and ``slower`` are under growing loads, instead of the
            values above; between two loads straight lines, for ``late_s`` of its logarithm (pauses grow by
            powers of ten where CPUs are nearly full), and beyond them what is true of the nearest.
        ids_per_sample: ids of a sample, over all features.
    """

    passes: tuple[tuple[int, float], ...]
    call_s: float = 0.0
    wake_s: float = 0.0
    client_call_s: float = 0.0
    client_wake_s: float = 0.0
    wire_s: float = 0.0
    spread_s: tuple[float, ...] = (0.0,)
    late_share: float = 0.0
    late_s: float = 0.0
    slower: float = 1.0
    under: tuple[UnderLoad, ...] = ()
    ids_per_sample: float = 0.0

    def __post_init__(self) -> None:
        for name in ("call_s", "wake_s", "client_call_s", "client_wake_s", "wire_s", "late_s"):
            _refuse_unless(name, getattr(self, name), least=0.0)
        _refuse_unless("ids_per_sample", self.ids_per_sample, least=0.0)
        _refuse_unless("slower", self.slower, least=1.0)
        sizes = [samples for samples, _ in self.passes]
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise FieldError("passes", sizes, "give sizes of at least 1 that grow")
        for _, seconds in self.passes:
            _refuse_unless("passes", seconds, least=0.0)
        if not 0 <= self.late_share <= 1:
            raise FieldError("late_share", self.late_share, "give a share of 0 to 1")
        loads = [one.load for one in self.under]
        if any(not b > a for a, b in itertools.pairwise(loads)):
            raise FieldError("under", loads, "give loads that grow")
        if not self.spread_s or any(not b >= a for a, b in itertools.pairwise(self.spread_s)):
            raise FieldError("spread_s", self.spread_s, "give ascending values")
        if not all(map(math.isfinite, self.spread_s)):
            raise FieldError("spread_s", self.spread_s, "give numbers that are not infinite")

    def pass_s(self, samples: int) -> float:
        """The usual time of a pass of ``samples`` samples."""
        points = self.passes
        if len(points) == 1 or samples <= points[0][0]:
            return self.slower * points[0][1]
        for (n0, t0), (n1, t1) in itertools.pairwise(points):  # noqa: B007 - the last ones are used
            if samples <= n1:
                break
        return self.slower * max(t0 + (t1 - t0) * (samples - n0) / (n1 - n0), 0.0)

    def busy_s(self, samples: int, *, of_batch: int, client: bool) -> float:
        """CPU time of a request of ``samples`` in batches of ``of_batch`` samples, where no thread has to be woken.

        Args:
            samples: of the request.
            of_batch: of the batch that it is computed in.
            client: whether a client uses the same CPUs.
        """
        passes_s = self.pass_s(of_batch) * samples / of_batch
        return self.call_s + self.client_call_s * client + passes_s

    def load_on(self, host: Host, rate: float, samples: int) -> float:
        """The share of the CPUs of ``host`` that ``rate`` requests a second need, in the largest batches measured."""
        largest = max(self.passes[-1][0], samples)
        needed_s = self.busy_s(samples, of_batch=largest, client=host.clients > 0)
        return rate * needed_s / host.cores

    def at(self, load: float) -> Costs:
        """The costs under ``load``, without ``under``."""
        if not self.under:
            return self
        loads = [one.load for one in self.under]

        def between(name: str) -> float:
            return float(np.interp(load, loads, [getattr(one, name) for one in self.under]))

        return replace(
            self,
            wake_s=between("wake_s"),
            client_wake_s=between("client_wake_s"),
            late_s=_of_powers(load, loads, [one.late_s for one in self.under]),
            slower=between("slower"),
            under=(),
        )


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests at random times (a Poisson process), of one size.

    Attributes:
        rate: requests a second at this host.
        samples: of a request.
        requests: how many are simulated.
        seed: of times and of how long passes take.
        warm_up: share of the requests, the first ones, that figures leave out.
    """

    rate: float
    samples: int = 1
    requests: int = 20_000
    seed: int = 0
    warm_up: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise FieldError("rate", self.rate, "give requests a second above 0")
        if self.samples < 1:
            raise FieldError("samples", self.samples, "give a whole number of at least 1")
        if not 100 <= self.requests <= MOST_REQUESTS:
            raise FieldError("requests", self.requests, f"give 100 to {MOST_REQUESTS}")
        if not 0 <= self.warm_up < 1:
            raise FieldError("warm_up", self.warm_up, "give a share of at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """How many requests and samples wait at most; more are refused."""

    max_requests: int = 4096
    max_samples: int = 65_536


def _of_powers(x: float, points: Sequence[float], values: Sequence[float]) -> float:
    """The value at ``x`` of straight lines of the logarithms, or of the values themselves beside a 0."""
    after = bisect.bisect(points, x)
    if after in (0, len(points)):
        return values[max(after - 1, 0)]
    low, high = values[after - 1 : after + 1]
    part = (x - points[after - 1]) / (points[after] - points[after - 1])
    if low > 0 and high > 0:
        return low * math.pow(high / low, part)
    return low + part * (high - low)


def _refuse_unless(field: str, value: float, *, least: float) -> None:
    if not least <= value < math.inf:
        raise FieldError(field, value, f"give a number of at least {least:g}")
