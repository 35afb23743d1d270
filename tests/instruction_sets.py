"""Programs that use our operators with an instruction set that the test chooses, as a process chooses it once."""

from tests import forked_program

_SETS = ("scalar", "avx2", "avx512", "amx")  # the slowest first
_TOLD = "the operators used the kernels "
_AT_THE_END = f"""
import sys
from tessera.kernels.libraries import cpu_kernels
sys.stderr.write({_TOLD!r} + cpu_kernels())
"""


def output_with(kernels, code, *arguments):
    """What ``python -c CODE ARGUMENTS`` prints.

    Args:
        kernels: the name of the best instruction set that it may use; "" for the best that there is.
        code: Python that calls operators.
        arguments: what it finds in ``sys.argv[1:]``.
    """
    environment = {**forked_program.usual_environment(), "TESSERA_CPU_KERNELS": kernels}
    done = forked_program.run(arguments, code=code + _AT_THE_END, environment=environment)
    assert done.returncode == 0, done.stderr
    used = done.stderr.rpartition(_TOLD)[2]
    assert used in (_SETS[: _SETS.index(kernels) + 1] if kernels else _SETS), done.stderr
    return done.stdout
