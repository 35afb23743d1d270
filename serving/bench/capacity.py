"""How many calls a second a server takes in an open loop.

A closed loop of many calls in flight says too much: they come in groups, as their answers do, so its batches are larger than
those of calls that come when they come. In an open loop a rate is too high where calls wait for each other longer and longer, so
the most that a server takes is the highest rate at which its slow calls are answered within a bound. It lies below
what the closed loop reaches, and is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable

BOUND_S = 0.05
"""A rate is too high where more than a hundredth of the calls takes longer."""
STEPS = 6
"""How often the range is halved: the capacity is known up to a 64th of what the closed loop reaches."""


def open_capacity(p99_s: Callable[[float], float], most: float) -> float:
    """The highest rate of those tried at which 99 of 100 calls take no longer than `BOUND_S`.

    A rate that is too high is tried once more, as something else on the machine may have been the reason.

    Args:
        p99_s: sends calls at so many a second for a while, and says the 99th percentile of their latency in seconds.
        most: calls a second of a closed loop.

    Raises:
        ValueError: the server does not even keep up with a 64th of ``most``.
    """
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        if p99_s(middle) <= BOUND_S or p99_s(middle) <= BOUND_S:
            low = middle
        else:
            high = middle
    if low == 0.0:
        raise ValueError(
            f"p99 is above {BOUND_S * 1e3:g} ms even at {high:.0f} calls a second, where a closed loop reached {most:.0f}: "
            "the server, or this machine, does too much else"
        )
    return low
