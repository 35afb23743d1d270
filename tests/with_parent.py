"""Programs that tests start and that end with the tests, however those ended.

    python tests/with_parent.py PARENT PROGRAM [ARGUMENT ...]

becomes PROGRAM after asking Linux to kill it when the process PARENT, which started it, is no
longer there.  The request is made here, in the child's own program, because nothing may run between
fork and exec in a process with gRPC's threads.
"""

import ctypes
import os
import signal
import subprocess
import sys

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def start(arguments, **options):
    """``subprocess.Popen`` of what is killed when pytest is; for the main thread alone."""
    launcher = [sys.executable, "-I", __file__, str(os.getpid())]
    return subprocess.Popen([*launcher, *map(str, arguments)], **options)


def main(parent, program, *arguments):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
        if os.getppid() != parent:
            return  # it ended before the request
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
