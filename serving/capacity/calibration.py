"""What calls cost on a machine, as ``tessera-load --calibrate`` has measured it: the file, and costs made of it.

Runs of one call at a time, of several sizes, give the time of a pass by the samples of its batch, and how it varies.
The run with the most calls in flight gives what a call costs outside its pass when nobody sleeps.  Runs of calls at random times,
at growing rates, show what waking threads costs and when they begin: `fit` takes it from their CPU times and latencies.
docs/capacity.md has the file's fields.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tessera import durable
from tessera.errors import UserError
from tessera.serving.capacity.model import Costs
from tessera.serving.package.strict_json import read_strictly

KIND, FORMAT = "tessera-costs", 1
_MOST_BYTES = 16 << 20
# A call's part outside the pass that is less than this share of the pass is lost in how passes vary.  It is then at
# most what a lone call takes, for which threads have to be woken, and at least this share of that and of the pass.
_LOST = 0.25
_LEAST = 0.25
_KEYS = ("kind", "format", "created", "server", "model", "samples", "ids_per_sample", "runs")
_QUANTILES = ("latency_us", "pass_us")
_WHOLE = ("samples", "in_flight", "connections", "calls")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of calls of one size, of which a fixed number was under way.

    Attributes:
        samples: of a call.
        in_flight: calls under way; 0 where they came at a rate.
        rate: calls/s at random times; 0 where a fixed number was under way.
        connections: of the client, each with a thread.
        seconds: length of the run.
        calls: how many were answered.
        cores_used: CPU time of server and client by the length of the run.
        server_cpu_us: the server's CPU time by the calls.
        client_cpu_us: the client's CPU time by the calls.
        batch_requests: calls of a batch, on average.
        batch_samples: samples of a batch, on average.
        latency_us: equally likely latencies of a call, ascending.
        pass_us: equally likely durations of the pass that computed a call, ascending.
    """

    samples: int
    in_flight: int
    rate: float
    connections: int
    seconds: float
    calls: int
    cores_used: float
    server_cpu_us: float
    client_cpu_us: float
    batch_requests: float
    batch_samples: float
    latency_us: tuple[float, ...]
    pass_us: tuple[float, ...]

    def latency_s(self, level: float) -> float:
        """The quantile ``level`` of the latencies.

        Between those of the file the distribution is taken for exponential, as that of the highest ones is: a
        straight line over ``-log(1 - level)``.
        """
        levels = (np.arange(len(self.latency_us)) + 0.5) / len(self.latency_us)
        return float(np.interp(-np.log1p(-level), -np.log1p(-levels), self.latency_us)) / 1e6


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A whole file.

    Attributes:
        created: when it was measured, as ISO 8601 in UTC.
        server: cpp or python.
        server_version: of the server.
        cpus: CPUs that it and the client could use.
        model: name of the package.
        model_version: of the package.
        samples: of a call of the runs with several in flight.
        ids_per_sample: ids of a sample, over all features.
        runs: in the order in which they were measured.
    """

    created: str
    server: str
    server_version: str
    cpus: int
    model: str
    model_version: str
    samples: int
    ids_per_sample: float
    runs: tuple[Run, ...]

    @property
    def alone(self) -> list[Run]:
        """The runs of one call at a time, by growing size."""
        return sorted((r for r in self.runs if r.in_flight == 1), key=lambda run: run.samples)

    @property
    def busiest(self) -> Run:
        """The run with the most calls in flight."""
        return max(self.runs, key=lambda run: run.in_flight)

    @property
    def rated(self) -> list[Run]:
        """The runs of calls at random times, by growing rates."""
        return sorted((r for r in self.runs if r.in_flight == 0), key=lambda run: run.rate)

    @property
    def calm(self) -> Run:
        """The one of the lowest rate."""
        return self.rated[0]

    def costs(self, samples: int) -> Costs:
        """What calls of ``samples`` samples cost.

        Raises:
            UserError: what was measured does not fit together.
        """
        alone, busy = self.alone, self.busiest
        passes = _growing([(run.samples, statistics.median(run.pass_us)) for run in alone])
        by_size = Costs(passes=tuple((size, us / 1e6) for size, us in passes))
        outside = [run.server_cpu_us - us for run, (_, us) in zip(alone, passes, strict=True)]
        sizes = [run.samples for run in alone]
        # What a call costs grows with its bytes; large calls are less exactly measured.
        weights = [1 / max(run.server_cpu_us, 1.0) for run in alone]
        base_us, grows_us = _line(sizes, outside, weights)
        _, client_grows_us = _line(sizes, [run.client_cpu_us for run in alone], weights)
        share_us = 1e6 * by_size.pass_s(round(busy.batch_samples)) / busy.batch_requests
        busy_us = busy.server_cpu_us - share_us
        of_lone = 1.0
        if abs(busy_us) < _LOST * share_us:
            # Whether passes take a little more or less than lone ones is not known.  What both cost together is.
            single_us = max(base_us + grows_us * busy.samples, 0.0)
            busy_us = min(max(busy_us, _LEAST * min(single_us, share_us)), single_us)
            of_lone = (busy.server_cpu_us - busy_us) / share_us
        if busy_us <= 0 or of_lone <= 0:
            raise UserError(
                f"runs say that {busy.in_flight} calls in flight took {busy.server_cpu_us:.1f} us of the server's CPU "
                f"each and their passes {share_us:.1f} us; calibrate again while the machine does nothing else"
            )
        usual = next(run for run in alone if run.samples == busy.samples)
        # How a pass varies where nobody takes the CPU from its thread: what others take is told by how late threads
        # begin, and counted as work it would keep the simulated CPUs busy.
        usual_us = statistics.median(usual.pass_us)
        more = samples - busy.samples
        return Costs(
            passes=tuple((size, of_lone * us / 1e6) for size, us in passes),
            call_s=max(busy_us + grows_us * more, 0.0) / 1e6,
            client_call_s=max(busy.client_cpu_us + client_grows_us * more, 0.0) / 1e6,
            spread_s=tuple(of_lone * (value - usual_us) / 1e6 for value in usual.pass_us),
            ids_per_sample=self.ids_per_sample,
        )

    def text(self) -> str:
        """The file's content, which `read_calibration` reads."""
        content = {
            "kind": KIND,
            "format": FORMAT,
            "created": self.created,
            "server": {"kind": self.server, "version": self.server_version, "cpus": self.cpus},
            "model": {"name": self.model, "version": self.model_version},
            "samples": self.samples,
            "ids_per_sample": self.ids_per_sample,
            "runs": [asdict(run) for run in self.runs],
        }
        return json.dumps(content, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the file, or replace it."""
        with durable.replacing(path) as stream:
            stream.write(self.text().encode())


def read_calibration(path: Path) -> Calibration:
    """The file at ``path``.

    Raises:
        UserError: it is not such a file, is damaged, or holds values that cannot have been measured.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(_MOST_BYTES + 1)
    try:
        return _calibration(_json(content))
    except ValueError as error:
        raise UserError(
            f"{path} is not a file of costs: {error}; measure again with tessera-load --calibrate"
        ) from error


def _json(content: bytes) -> Any:
    if len(content) > _MOST_BYTES:
        _refuse(f"it is longer than {_MOST_BYTES} bytes")
    try:
        return read_strictly(content)
    except RecursionError:
        _refuse("it is too deep")


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _calibration(found: Any) -> Calibration:
    top = _object("the file", found, _KEYS)
    if top["kind"] != KIND or top["format"] != FORMAT:
        _refuse(f"kind is {top['kind']!r} and format {top['format']!r}, not {KIND!r} and {FORMAT}")
    server = _object("server", top["server"], ("kind", "version", "cpus"))
    if server["kind"] not in ("cpp", "python"):
        _refuse(f"server.kind is {server['kind']!r}, not cpp or python")
    model = _object("model", top["model"], ("name", "version"))
    if not isinstance(top["runs"], list):
        _refuse("runs is not a list")
    calibration = Calibration(
        created=_text("created", top["created"]),
        server=server["kind"],
        server_version=_text("server.version", server["version"]),
        cpus=int(_number("server.cpus", server["cpus"], whole=True, least=1)),
        model=_text("model.name", model["name"]),
        model_version=_text("model.version", model["version"]),
        samples=int(_number("samples", top["samples"], whole=True, least=1)),
        ids_per_sample=_number("ids_per_sample", top["ids_per_sample"]),
        runs=tuple(_run(f"runs[{i}]", run) for i, run in enumerate(top["runs"])),
    )
    sizes = [run.samples for run in calibration.alone]
    if len(set(sizes)) < 2 or len(set(sizes)) < len(sizes):
        _refuse(f"runs with one call in flight have sizes {sizes}; two that differ are needed")
    if calibration.samples not in sizes:
        _refuse(f"no run has one call of {calibration.samples} samples in flight")
    rated = calibration.rated
    if not rated or any(run.samples != calibration.samples for run in rated):
        _refuse(f"not one run or several have calls of {calibration.samples} samples at a rate")
    if len({run.rate for run in rated}) < len(rated):
        _refuse(f"runs came at the rates {[run.rate for run in rated]}; they have to differ")
    busy = calibration.busiest
    if busy.in_flight <= 1 or busy.samples != calibration.samples:
        _refuse(f"no run has several calls of {calibration.samples} samples in flight")
    return calibration


def _run(name: str, found: Any) -> Run:
    values = dict(_object(name, found, tuple(field.name for field in fields(Run))))
    for key, value in values.items():
        if key in _QUANTILES:
            values[key] = _quantiles(f"{name}.{key}", value)
        else:
            whole = key in _WHOLE
            least = 1 if whole and key != "in_flight" else 0
            number = _number(f"{name}.{key}", value, whole=whole, least=least)
            values[key] = int(number) if whole else number
    run = Run(**values)
    for key in ("seconds", "server_cpu_us", "batch_requests", "batch_samples"):
        if not getattr(run, key) > 0:
            _refuse(f"{name}.{key} is {getattr(run, key)}, which must be above 0")
    if (run.in_flight > 0) == (run.rate > 0):
        _refuse(f"{name} has in_flight {run.in_flight} and rate {run.rate}; one of them is 0")
    if not statistics.median(run.pass_us) > 0:
        _refuse(f"{name}.pass_us has the median 0, so that nothing is known of passes")
    return run


def _object(name: str, found: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        _refuse(f"{name} is not an object")
    for key in keys:
        if key not in found:
            _refuse(f"{name} has no {key}")
    for key in found:
        if key not in keys:
            _refuse(f"{name} has an unknown {key!r}")
    return found


def _text(name: str, found: Any) -> str:
    if not isinstance(found, str):
        _refuse(f"{name} is {found!r}, not a string")
    return found


def _number(name: str, found: Any, *, whole: bool = False, least: float = 0) -> float:
    kinds = (int,) if whole else (int, float)
    if isinstance(found, bool) or not isinstance(found, kinds) or not least <= found < math.inf:
        what = "whole number" if whole else "number"
        _refuse(f"{name} is {found!r}, not a {what} of at least {least}")
    return float(found)


def _quantiles(name: str, found: Any) -> tuple[float, ...]:
    if not isinstance(found, list) or not found:
        _refuse(f"{name} is not a list of numbers")
    values = tuple(_number(f"{name}[{i}]", value) for i, value in enumerate(found))
    if list(values) != sorted(values):
        _refuse(f"{name} does not ascend")
    return values


def _growing(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points, of which none is below one of a smaller size: more samples never take less."""
    most, grown = 0.0, []
    for size, us in points:
        most = max(most, us)
        grown.append((size, most))
    return grown


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Value at 0 and slope of the line of least squares, whose slope is not negative."""
    slope, base = np.polyfit(x, y, 1, w=weights)
    if slope < 0:
        return float(np.average(y, weights=np.square(weights))), 0.0
    return float(base), float(slope)
