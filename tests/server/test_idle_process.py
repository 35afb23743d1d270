"""Work in a process of the idle class, which is begun again where that one gets no CPU."""

import subprocess
import sys
import textwrap

_HEAD = """
import os, signal, time
from tessera.serving.server.idle_process import Patience, run_when_idle
told, write = os.pipe()

def tell():
    kind = "idle" if os.sched_getscheduler(0) == os.SCHED_IDLE else "other"
    os.write(write, f"{kind} ".encode())
"""


def told_by(script: str) -> list[str]:
    """What a script told, and the status that it printed; it runs in a process with a single thread."""
    tail = "os.close(write); print(os.read(told, 100).decode(), status)"
    program = "\n".join([_HEAD, textwrap.dedent(script), tail])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert not done.stderr
    return done.stdout.split()


def test_the_work_is_done_once_by_a_process_of_that_class():
    assert told_by(
        """
        def body():
            tell()
            return 3
        status = run_when_idle(body, Patience(share=0.0))
        """
    ) == ["idle", "3"]


def test_the_process_that_asks_begins_again_where_the_other_has_no_cpu():
    # One that sleeps has none, as one that waits for a CPU; it never ends by itself.  It is watched once it has told
    # of itself, for which it has to wait where CPUs are busy all the time.
    assert told_by(
        """
        from tessera.serving.server import idle_process
        begun, begin = os.pipe()
        watch = idle_process._watch

        def watch_what_has_begun(pid, patience):
            os.read(begun, 1)
            return watch(pid, patience)

        def body():
            tell()
            os.write(begin, b"1")
            while os.sched_getscheduler(0) == os.SCHED_IDLE:
                time.sleep(1)
            return 4

        idle_process._watch = watch_what_has_begun
        status = run_when_idle(body, Patience(0.5, 0.2))
        """
    ) == ["idle", "other", "4"]


def test_work_that_has_enough_is_left_where_it_is():
    assert told_by(
        """
        def body():
            tell()
            begin = time.process_time()
            while time.process_time() - begin < 0.03:
                pass
            return 0
        status = run_when_idle(body, Patience(0, 0.01))
        """
    ) == ["idle", "0"]


def test_a_process_that_ends_by_a_signal_is_not_begun_again():
    assert told_by(
        """
        def body():
            tell()
            os.kill(os.getpid(), signal.SIGKILL)
        status = run_when_idle(body, Patience(share=0.0))
        """
    ) == ["idle", "137"]
