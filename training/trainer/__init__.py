"""The trainer: loop, evaluation, checkpoints, logs and report of one run.

The command line looks at run folders without torch.
"""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.trainer.run import RunResult as RunResult, train as train

__all__, __getattr__, __dir__ = lazy_names(__name__)
