"""The names of ``torchrec.types``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.plan.sharded_module import ModuleNoCopyMixin as ModuleNoCopyMixin
from tessera.training.modules.embedding_configs import DataType as DataType
