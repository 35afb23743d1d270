"""The names of ``torchrec.distributed.grouped_position_weighted``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.position_weights import (
    GroupedPositionWeightedModule as GroupedPositionWeightedModule,
)
