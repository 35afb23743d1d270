"""What the benchmarks share: arguments, the machine's line, turns and tables.  Loads no torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser of a script's flags, which shows the script's docstring as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> str:
    """The processor, the CPUs that this process may use, the load, and torch's version."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, torch {importlib.metadata.version('torch')}"
    )


def seconds_of(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    begin = clock()
    work()
    return clock() - begin


def in_turns(contenders: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """What each contender gives in each round.

    They take turns, so that whatever else the machine does falls on all of them, and the order is
    turned around from round to round.
    """
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, measure in list(contenders.items())[:: -1 if number % 2 else 1]:
            found[name].append(measure())
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def microseconds(
    forms: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float, clock: Clock
) -> dict[str, float]:
    """The median over rounds of each form's time per call, in microseconds.

    A round calls a form as often as fits into its part of ``seconds``.
    """

    def mean_us(call: Callable[[], object], calls: int) -> float:
        begin = clock()
        for _ in range(calls):
            call()
        return (clock() - begin) / calls * 1e6

    measures = {}
    for name, call in forms.items():
        mean_us(call, 5)  # warms up
        calls = max(3, int(seconds / rounds * 1e6 / mean_us(call, 10)))
        measures[name] = partial(mean_us, call, calls)
    return medians(in_turns(measures, rounds))


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(*names: str) -> None:
    print_row(*names)
    print_row(*["---"] * len(names))


def in_own_process(target: Callable[..., None], *arguments: object) -> None:
    """Call ``target`` in a process, of which nothing stays in this one; exit where it fails."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{target.__name__} ended with exit status {process.exitcode}")
