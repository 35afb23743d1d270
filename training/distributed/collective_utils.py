"""The names of ``torchrec.distributed.collective_utils``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.comm.leader import (
    invoke_on_rank_and_broadcast_result as invoke_on_rank_and_broadcast_result,
    is_leader as is_leader, run_on_leader as run_on_leader,
)
