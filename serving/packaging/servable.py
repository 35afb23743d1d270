"""From a model in memory to its served form: quantize, shard, trace, script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from tessera.kernels.libraries import load_libraries
from tessera.serving.package.manifest import ShardingPlan
from tessera.serving.package.schema import FeatureSpec, InputSchema, OutputSpec
from tessera.serving.packaging.dense_gpu import fuse_crosses, keep_narrow, narrow_linears
from tessera.serving.packaging.embedding import float_tables, with_stored_tables
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.predict import PredictModule
from tessera.serving.packaging.script import script
from tessera.serving.packaging.tables.choose_types import choose_types
from tessera.serving.packaging.tables.quantize import FloatTable, StoredTables, quantize_tables
from tessera.serving.packaging.tables.shard import check_plan, plan_shards
from tessera.serving.packaging.trace import trace
from tessera.training.models.ranking import RankingModel


@dataclass(frozen=True, kw_only=True)
class ServableModel:
    """A model in its served form, before it is a file.

    Attributes:
        schema: inputs and outputs.
        tables: the stored tables.
        plan: where they lie.
        dense_bytes: bytes of the model's other parameters in float32.
        dense_bytes_saved: how many fewer they are as packaged.
        eager: the served form as a plain module.
        graph: the same, traced and with packed dense layers, run by Python op by op; what the
            scripted one must equal bit for bit.
        scripted: the same as TorchScript.
    """

    schema: InputSchema
    tables: StoredTables
    plan: ShardingPlan
    dense_bytes: int
    dense_bytes_saved: int
    eager: nn.Module
    graph: fx.GraphModule
    scripted: torch.jit.ScriptModule

    @property
    def dtype(self) -> str:
        """The tables' type, or ``mixed``."""
        kinds = {table.info.dtype for table in self.tables.tables}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def bytes_fp32(self) -> int:
        """Of all weights before packaging."""
        return self.dense_bytes + sum(table.info.bytes_fp32 for table in self.tables.tables)

    @property
    def bytes_packaged(self) -> int:
        """Of all weights as packaged."""
        tables = sum(table.info.bytes for table in self.tables.tables)
        return self.dense_bytes - self.dense_bytes_saved + tables


def make_servable(
    model: RankingModel,
    options: PackageOptions,
    *,
    origin: Origin | None = None,
    progress: bool = False,
    allocate: Callable[[int], Tensor] | None = None,
) -> ServableModel:
    """Quantize, trace and script a model, without writing a package.

    Args:
        model: float32, with plain tables; left as it is.
        options: see `PackageOptions`.
        origin: see `Origin`.
        progress: show a progress bar where stderr is a terminal.
        allocate: see `quantize_tables`.

    Raises:
        UserError: something that cannot be packaged.
    """
    origin = origin or Origin()
    backend = lookup_backend(options.backend)
    load_libraries(backend.operator_libraries)
    floats = float_tables(model)
    tables, plan = store_tables(floats, options, progress=progress, allocate=allocate)
    schema = input_schema(model, output=options.output, dense_transform=origin.dense_transform)
    features = (*schema.group("id_list"), *schema.group("id_score_list"))
    on_cpu = options.device == "cpu"
    interaction = backend.interaction() if on_cpu else None
    stored = with_stored_tables(model, tables, features, backend, interaction=interaction)
    eager = PredictModule(stored, schema).eval()
    graph = trace(eager)
    saved = 0
    if on_cpu:
        saved = backend.pack(graph, options.dense_dtype)
    elif options.dense_dtype == "bf16":
        saved = narrow_linears(graph)
        keep_narrow(graph)
        fuse_crosses(graph)
    return ServableModel(
        schema=schema,
        tables=tables,
        plan=plan,
        dense_bytes=dense_bytes(model, floats),
        dense_bytes_saved=saved,
        eager=eager,
        graph=graph,
        scripted=script(graph, device=options.device),
    )


def store_tables(
    floats: Sequence[FloatTable],
    options: PackageOptions,
    *,
    progress: bool = False,
    allocate: Callable[[int], Tensor] | None = None,
) -> tuple[StoredTables, ShardingPlan]:
    """Choose each table's type and place, and store it.

    Raises:
        UserError: choices that do not fit the tables.
    """
    kinds = choose_types(floats, options.types)
    if options.plan is not None:
        plan = check_plan(options.plan, floats, kinds, device=options.device)
    else:
        plan = plan_shards(
            floats,
            kinds,
            shards=options.shards,
            device=options.device,
            sharding=options.sharding,
            by_pattern=options.table_sharding,
        )
    rows = sum(len(table.weights) for table in floats)
    with progress_bar("quantize", rows, progress=progress) as bar:
        tables = quantize_tables(
            floats,
            kinds,
            plan=plan,
            for_gpu=options.device == "cuda",
            on_rows=bar.update,
            allocate=allocate,
        )
    return tables, plan


def input_schema(model: RankingModel, *, output: str, dense_transform: str) -> InputSchema:
    """What the served form of ``model`` takes and gives."""
    return InputSchema(
        dense_features=model.dense_names,
        dense_missing="nan",
        dense_transform=dense_transform,
        features=tuple(FeatureSpec(**vars(feature)) for feature in model.features),
        outputs=(OutputSpec(name=output, width=1),),
    )


def dense_bytes(model: nn.Module, floats: Sequence[FloatTable]) -> int:
    """Bytes of the parameters that are no tables."""
    tables = {id(table.weights) for table in floats}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in tables)


def progress_bar(what: str, total: int | None, *, progress: bool) -> tqdm[Any]:
    """A bar that counts rows, where it is wanted and stderr is a terminal."""
    # disable=None: only where stderr is a terminal.
    return tqdm(
        total=total,
        desc=what,
        unit=" rows",
        unit_scale=True,
        leave=False,
        disable=None if progress else True,
    )
