"""Programs that tests start and that end with the tests, however those ended."""

import ctypes
import signal
import subprocess
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def _die_with_parent():
    if _LIBC is not None:
        _LIBC.prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)


def start(*arguments, **options):
    """``subprocess.Popen`` of what is killed when pytest is; for the main thread alone."""
    return subprocess.Popen(*arguments, preexec_fn=_die_with_parent, **options)  # noqa: PLW1509 - the one call in it allocates nothing
