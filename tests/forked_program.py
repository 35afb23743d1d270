"""``python -m tessera``, and ``python -c`` of code that uses it, started many times: forked from a process that has imported what it imports.

Importing torch takes a program three seconds of a CPU and more, longer than what most tests look at.  What `start`
and `run` give is a process of its own, with its own memory, arguments, environment and files, that runs ``tessera``'s
main program, or the code, to its end, whatever that is, and the interpreter's; all that it has not done itself is to
load the libraries and compile the sources, and all that it leaves out is what C++ destroys behind the interpreter's
end, which for torch's thousands of operators takes longer than most programs here.  As libraries read the environment
when they are loaded, there is such a process for each environment, from the second program on that has it; the first
is started anew, but for the very first environment's.  What a program does from its first instruction on is for tests
that start it by ``subprocess``.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.patience import PATIENCE_S

_IMPORTED = ("tessera.serving.server.main", "tessera.serving.commands.serve")
"""What ``tessera serve`` imports; ``tessera verify`` imports part of that."""
_MESSAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
# Of pytest alone; what this module and the command set before gRPC is imported; and what our operators read at the
# first call of one, which is after the fork.
_NOT_COMPARED = {"PYTEST_CURRENT_TEST", "GRPC_VERBOSITY", "TESSERA_CPU_KERNELS"}


def _compared(environment):
    return {name: value for name, value in environment.items() if name not in _NOT_COMPARED}


class ForkedProgram:
    """What ``subprocess.Popen`` is, as far as tests use it: ``stdout`` and ``stderr`` are text files or None."""

    def __init__(self, source, asked, stdout, stderr):
        self.args = asked["argv"]
        self.returncode = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        with contextlib.ExitStack() as given_on:
            self.stdout, out = _end_of(stdout, 1, given_on)
            both = stderr == subprocess.STDOUT
            self.stderr, err = (None, out) if both else _end_of(stderr, 2, given_on)
            self.pid = source.fork(self, asked, [out, err])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()
        for file in filter(None, (self.stdout, self.stderr)):
            file.close()

    def end(self, status):
        """Note that it has ended; called once, by who hears of it."""
        with self._lock:
            self.returncode = status
        self._ended.set()

    def poll(self):
        """Its exit status, below zero for a signal's number, or None while it runs."""
        return self.returncode

    def wait(self, timeout=None):
        """Its exit status once it has ended."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """What is left to read of its output and of its errors, as texts or None, once it has ended."""
        with ThreadPoolExecutor(2) as pool:
            texts = [
                pool.submit(file.read) if file else None for file in (self.stdout, self.stderr)
            ]
            self.wait(timeout)
        return tuple(text and text.result() for text in texts)

    def send_signal(self, number):
        """Send it a signal, unless it has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def terminate(self):
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """End it."""
        self.send_signal(signal.SIGKILL)


def _end_of(asked, ours, given_on):
    """What a test reads of a program's output, and the descriptor that the program writes to."""
    if asked is None:
        return None, ours
    if asked != subprocess.PIPE:
        return None, asked if isinstance(asked, int) else asked.fileno()
    reader, writer = os.pipe()
    given_on.callback(os.close, writer)
    return os.fdopen(reader, errors="backslashreplace"), writer


class _Source:
    """The process that programs are forked from, and the thread that hears of their ends."""

    def __init__(self, environment):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(  # it ends when the socket is closed
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).resolve().parents[1],
            env=environment,
        )
        theirs.close()
        self._programs = []
        self._pids = {}
        self._changed = threading.Condition()
        self.gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, program, asked, files):
        """The id of the new process, which ``program`` hears the end of.

        ``asked`` is its ``argv`` and ``environment`` and, where it does not run ``tessera``, its ``code``.
        """
        with self._changed:
            number = len(self._programs)
            self._programs.append(program)
            asked = {**asked, "number": number, "folder": str(Path.cwd())}
            socket.send_fds(self._socket, [json.dumps(asked).encode()], files)
            answered = self._changed.wait_for(lambda: number in self._pids or self.gone, PATIENCE_S)
            if not answered or self.gone:
                raise RuntimeError("the process that programs are forked from does not answer")
            return self._pids.pop(number)

    def stop(self):
        """End it, and with it the programs that still run."""
        self.process.kill()
        self.process.wait()

    def _told(self):
        with contextlib.suppress(ConnectionResetError):
            while message := self._socket.recv(_MESSAGE_BYTES):
                yield json.loads(message)

    def _listen(self):
        for told in self._told():
            with self._changed:
                if "pid" in told:
                    self._pids[told["number"]] = told["pid"]
                    self._changed.notify_all()
                else:
                    self._programs[told["number"]].end(told["status"])
        with self._changed:
            self.gone = True
            for program in self._programs:
                if program.poll() is None:
                    program.end(-signal.SIGKILL)
            self._changed.notify_all()


_sources = {}
_seen = set()
_one_at_a_time = threading.Lock()


@atexit.register
def _stop():
    for source in _sources.values():
        source.stop()


def usual_environment():
    """This process's, but for the libraries' folders, as a program finds what it needs, and with one thread for torch."""
    own = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return {**own, "OMP_NUM_THREADS": "1"}


def start(arguments, *, code=None, environment=None, stdout=None, stderr=None):
    """``python -m tessera`` with these arguments; where it is forked, it is killed at the end of pytest.

    Args:
        arguments: what follows ``tessera``, or the code.
        code: Python that runs in ``tessera``'s place.
        environment: its environment; None: `usual_environment`.
        stdout, stderr: as of ``subprocess.Popen``; of a pipe the text is read.
    """
    environment = usual_environment() if environment is None else environment
    arguments = [str(argument) for argument in arguments]
    compared = frozenset(_compared(environment).items())
    with _one_at_a_time:
        source = _sources.get(compared)
        if (source is None and (not _sources or compared in _seen)) or (source and source.gone):
            source = _sources[compared] = _Source(environment)
        _seen.add(compared)
    if source is None:
        program = ["-m", "tessera"] if code is None else ["-c", code]
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="backslashreplace",
            env=environment,
        )
    argv = ["tessera" if code is None else "-c", *arguments]
    asked = {"argv": argv, "code": code, "environment": environment}
    return ForkedProgram(source, asked, stdout, stderr)


def run(arguments, **options):
    """The same to its end, as ``subprocess.run`` with ``capture_output`` gives it; ``options`` as of `start`."""
    with start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as program:
        late = threading.Timer(PATIENCE_S, program.kill)
        late.start()
        stdout, stderr = program.communicate()
        late.cancel()
    return subprocess.CompletedProcess(program.args, program.returncode, stdout, stderr)


def _become(given, files):
    """In the child: what a new process begins with."""
    c = ctypes.CDLL(None)
    c.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What C runs when the interpreter has come to its end, the last first.
    c.on_exit(c._exit, None)
    c.__cxa_atexit(c.fflush, None, None)
    for descriptor, number in zip(files, (1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = given["argv"]


def _tell_of_ends(numbers, channel):
    """Tell of each program that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            told = {"number": numbers.pop(pid), "status": os.waitstatus_to_exitcode(status)}
            channel.send(json.dumps(told).encode())


def _fork_as_asked(channel):
    """Fork for each message; returns in the children alone, with the code that they run instead of ``tessera``, or None."""
    numbers = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            woken.recv(_MESSAGE_BYTES)
            _tell_of_ends(numbers, channel)
        if channel not in ready:
            continue
        message, files, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
        if not message:
            sys.exit()
        given = json.loads(message)
        pid = os.fork()
        if not pid:
            _become(given, files)
            for each in (channel, woken, waker):
                each.close()
            return given["code"]
        for descriptor in files:
            os.close(descriptor)
        numbers[pid] = given["number"]
        channel.send(json.dumps({"number": given["number"], "pid": pid}).encode())


def _main(descriptor):
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # as `tessera serve` does before it imports gRPC
    for name in _IMPORTED:
        importlib.import_module(name)
    # What is there by now is nobody's to collect, and stays shared with the children.
    gc.collect()
    gc.freeze()
    code = _fork_as_asked(socket.socket(fileno=int(descriptor)))
    if code is None:
        runpy.run_module("tessera", run_name="__main__", alter_sys=True)
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main(sys.argv[1])
