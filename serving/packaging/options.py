"""What the user chooses, and what is known of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.errors import UserError, refuse_unknown
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving.package.manifest import ShardingPlan
from tessera.serving.package.signing import read_private_key
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.lookups.backends import default_backend, lookup_backend
from tessera.serving.packaging.tables.choose_types import TypeChoice
from tessera.serving.packaging.tables.shard import SHARDINGS

DEVICES = ("cpu", "cuda")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """What the user chooses.

    Attributes:
        name: the model's name: letters, digits, ``.``, ``_`` and ``-``.
        version: its version, of the same letters.
        dtype: how the tables' elements are stored, where nothing below names a table: ``int8``,
            ``int8b``, ``int4``, ``int2``, ``fp8``, ``fp16``, ``bf16`` or ``fp32``.
        table_dtypes: by a pattern of table names (``*`` and ``?``), their weight type; the first
            that fits counts.
        max_table_error: a table whose relative RMSE is larger keeps a wider type.
        dense_dtype: how the weights of `torch.nn.Linear` layers are stored, ``fp32``, ``bf16`` or, for
            GPUs, ``fp8`` (the last two with the tessera backend only); layers inside ``leaf_modules``
            stay float32.
        backend: whose lookup operator; `default_backend` where none is named.
        device: the kind of device that the model will run on, ``cpu`` or ``cuda``.
        shards: over how many devices of one process the tables are spread.
        sharding: ``auto``, ``table_wise``, ``row_wise`` or ``column_wise``; see
            `tessera.serving.packaging.tables.shard`.
        table_sharding: by a pattern of table names, how those are spread.
        plan: which rows and columns of which table lie in which shard, instead of the last three.
        output: the output's name, where the module returns a tensor.
        leaf_modules: qualified names or class names of submodules that TorchScript compiles
            whole, because ``torch.fx`` cannot trace them.
        allow_ops: operators that the graph may call beside those of
            `tessera.serving.package.operators`; whoever loads the package has to allow them, too.
        sign_key: a PEM file with the private Ed25519 key to sign with; None: not signed.

    Raises:
        UserError: naming the field, its value and what to give, or what to install.
    """

    name: str
    version: str = "1"
    dtype: str = "int8"
    table_dtypes: Mapping[str, str] = field(default_factory=dict)
    max_table_error: float | None = None
    dense_dtype: str = "fp32"
    backend: str = field(default_factory=default_backend)
    device: str = "cpu"
    shards: int = 1
    sharding: str = "auto"
    table_sharding: Mapping[str, str] = field(default_factory=dict)
    plan: ShardingPlan | None = None
    output: str = "default"
    leaf_modules: Sequence[str] = ()
    allow_ops: Sequence[str] = ()
    sign_key: Path | None = None

    def __post_init__(self) -> None:
        for what in ("name", "version", "output"):
            value = getattr(self, what)
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise UserError(
                    f"the model's {what} is {value!r}; give letters, digits, '.', '_' and '-', "
                    "beginning with a letter or digit"
                )
        if isinstance(self.leaf_modules, str):
            raise UserError(
                f"leaf_modules is {self.leaf_modules!r}; give a list, [{self.leaf_modules!r}]"
            )
        self._check_backend()
        self._check_places()
        if self.sign_key is not None:
            read_private_key(self.sign_key)

    def _check_backend(self) -> None:
        backend = lookup_backend(self.backend)
        for kind in self.types.kinds():
            if kind not in backend.weight_types and kind in ROW_TYPES:
                raise UserError(
                    f"dtype {kind!r} cannot be looked up by the {self.backend} backend, which has "
                    f"{', '.join(backend.weight_types)}; give one of these, or another --backend"
                )
        refuse_unknown("dense_dtype", self.dense_dtype, DENSE_TYPES)
        if self.dense_dtype not in backend.dense_types:
            raise UserError(
                f"dense_dtype is {self.dense_dtype}, which the {self.backend} backend does not have; "
                "package with --backend tessera or with --dense-dtype fp32"
            )
        devices = DENSE_TYPES[self.dense_dtype].devices
        if self.device in DEVICES and self.device not in devices:
            raise UserError(
                f"dense_dtype is {self.dense_dtype}, which is for --device {' and '.join(devices)}; "
                f"give that, or --dense-dtype bf16 for --device {self.device}"
            )

    def _check_places(self) -> None:
        refuse_unknown("device", self.device, DEVICES)
        for value in (self.sharding, *self.table_sharding.values()):
            refuse_unknown("sharding", value, SHARDINGS)
        if not isinstance(self.shards, int) or self.shards < 1:
            raise UserError(f"shards is {self.shards!r}; give a whole number of 1 or more")
        how = self.sharding != "auto" or bool(self.table_sharding)
        if self.plan is not None and (self.shards > 1 or how):
            raise UserError("give either a plan or shards, sharding and table_sharding")
        if self.shards == 1 and how:
            raise UserError("sharding is for several shards; give --shards of 2 or more")
        sharded = self.shards > 1 or self.plan is not None
        if self.backend == "fbgemm" and (sharded or self.device != "cpu"):
            raise UserError(
                "the fbgemm backend packages for one CPU; package with --backend tessera for "
                "--shards and --device cuda"
            )

    @property
    def types(self) -> TypeChoice:
        """The choice of the tables' types."""
        return TypeChoice(
            default=self.dtype,
            by_pattern=self.table_dtypes,
            max_error=self.max_table_error,
            usable=lookup_backend(self.backend).weight_types,
        )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known of the weights, for the manifest.

    ``source`` is the checkpoint's file name and step, or the module's class; ``metrics`` are those
    that training stored, by split; ``created`` is UTC time, ISO 8601 with ``Z`` (empty: that of
    packaging).
    """

    source: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, int | float | None]] = field(default_factory=dict)
    created: str = ""
