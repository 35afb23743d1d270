"""Work that `test_processes` gives to processes, which import it by this module's name."""

from __future__ import annotations

import os
import signal


def square(number: int) -> int:
    return number * number


def pid_of(_task: object) -> int:
    return os.getpid()


def chatter(number: int) -> int:
    print("a stray line on standard output")
    return number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise ArithmeticError("three")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number
