"""Programs that tests start and that end with the tests, however those ended.

A program is started through this file, which asks the kernel to kill the process when its parent
dies and then becomes the program.  `subprocess`'s ``preexec_fn`` would ask it between fork and exec,
in a copy of a process whose other threads (gRPC's among them) may have held any lock.
"""

import ctypes
import os
import signal
import subprocess
import sys

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def start(arguments, **options):
    """``subprocess.Popen`` of a program that is killed when pytest is; for the main thread alone.

    The kernel looks at the thread that starts it: the program is killed when that thread ends.
    """
    if sys.platform != "linux":
        return subprocess.Popen(arguments, **options)
    launcher = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return subprocess.Popen([*launcher, *arguments], **options)


def _become(parent, program, *arguments):
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit("the process that started this program has ended")
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    _become(*sys.argv[1:])
