"""From a module in memory to its served form: store tables, trace, run the passes, script."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from tessera.errors import UserError
from tessera.kernels.libraries import load_libraries
from tessera.serving.package.manifest import ShardingPlan
from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.answers import Answers
from tessera.serving.packaging.calibration import calibration_samples
from tessera.serving.packaging.collections.find import find_tables
from tessera.serving.packaging.collections.hashing import (
    HashedIds,
    find_hashers,
    hash_specs,
    mapped_features,
    vocabulary_features,
)
from tessera.serving.packaging.collections.swap import with_stored_tables
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.evaluate import LabelledBatch
from tessera.serving.packaging.inputs import (
    DEFAULT_OUTPUT,
    Arguments,
    module_schema,
    named_outputs,
    output_specs,
    read_arguments,
    read_inputs,
    with_mapped,
    with_vocabularies,
)
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.passes.ranges import SAMPLES
from tessera.serving.packaging.passes.registry import Target, run_passes
from tessera.serving.packaging.predict import Predict
from tessera.serving.packaging.script import script
from tessera.serving.packaging.source import Source
from tessera.serving.packaging.tables.choose_types import choose_types
from tessera.serving.packaging.tables.quantize import (
    FloatTable,
    SourceTable,
    one_device,
    quantize_tables,
)
from tessera.serving.packaging.tables.shard import check_plan, plan_shards
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.serving.packaging.tables.taken_over import QuantizedTable, plan_of_blocks
from tessera.serving.packaging.trace import generated_code_forgotten, trace
from tessera.users_code import first_line, users_place


@dataclass(frozen=True, kw_only=True)
class ServableModel:
    """A model in its served form, before it is a file.

    Attributes:
        dense_bytes: bytes of the parameters that are not tables, in float32.
        dense_bytes_saved: how many fewer they are as packaged.
        packed: the module with stored tables in the place of its own; takes what the module takes,
            raw ids instead of rows where a `FeatureRule` says so.
        eager: the same with a package's six inputs.
        graph: the same, traced and changed by the passes, run by Python op by op; what the
            scripted one must equal bit for bit.
    """

    schema: InputSchema
    tables: StoredTables
    plan: ShardingPlan
    dense_bytes: int
    dense_bytes_saved: int
    packed: nn.Module
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
        """Bytes of all weights before packaging."""
        return self.dense_bytes + sum(table.info.bytes_fp32 for table in self.tables.tables)

    @property
    def bytes_packaged(self) -> int:
        """Bytes of all weights as packaged."""
        tables = sum(table.info.bytes for table in self.tables.tables)
        return self.dense_bytes - self.dense_bytes_saved + tables


@generated_code_forgotten()
def make_servable(
    source: Source,
    options: PackageOptions,
    *,
    progress: bool = False,
    allocate: Callable[[int], Tensor] | None = None,
    calibration: Iterable[LabelledBatch] = (),
    stored: tuple[StoredTables, ShardingPlan] | None = None,
) -> ServableModel:
    """Quantize, trace and script a module, without writing a package.

    The module of ``source`` is left as it is.  ``allocate`` makes the tables' buffers; see
    `tessera.serving.packaging.tables.quantize.quantize_tables`.  With ``stored`` the module's tables have been
    stored already, and its own are not looked at.  ``calibration`` are rows on which the activations of dense
    types that need it are measured; where there are none it is the golden batch.

    Raises:
        UserError: something that cannot be packaged; says what and how to go on.
    """
    module, inputs, sample_batch = source
    _check_module(module, options)
    inputs = read_inputs(inputs)
    backend = lookup_backend(options.backend)
    load_libraries(backend.operator_libraries)
    arguments = read_arguments(sample_batch)
    found = find_tables(module)
    specs = hash_specs(find_hashers(module).values())
    # A first schema without outputs: they are seen when the module runs.
    schema = module_schema(inputs, arguments, found, specs, ())
    tables, plan = stored or store_tables(
        found.sources, options, progress=progress, allocate=allocate
    )
    packed = with_stored_tables(module, found, tables, schema, backend)
    output = options.output if options.output != DEFAULT_OUTPUT else inputs.output
    watch = HashedIds()
    lookups = [c.path for c in found.collections if c.kind.only_looks_up(c.module)]
    with watch.watching(packed, map(packed.get_submodule, lookups)):
        outputs = _run_sample(packed, arguments, output)
    left_out = find_hashers(module).keys() - watch.elsewhere
    if left_out:
        packed = with_stored_tables(module, found, tables, schema, backend, left_out=left_out)
    schema = with_vocabularies(
        module_schema(inputs, arguments, found, specs, output_specs(outputs, arguments.batch_size)),
        vocabulary_features(module),
    )
    schema = with_mapped(schema, mapped_features(module), inputs.features)
    unpadded, padded = (
        Predict(packed, arguments.kinds, schema, outputs, padded=padded).eval()
        for padded in (False, True)
    )
    answers = Answers(unpadded, schema)
    eager, graph = padded, trace(padded, leaf_modules=options.leaf_modules)
    if not answers.met_while_observed(graph):
        eager, graph = unpadded, trace(unpadded, leaf_modules=options.leaf_modules)
        answers.met_while_observed(graph)
    answers.check(graph)
    target = Target(backend=options.backend, device=options.device, dense_dtype=options.dense_dtype)
    if DENSE_TYPES[options.dense_dtype].calibrated:
        graph.meta[SAMPLES] = calibration_samples(calibration, schema)
    saved = run_passes(graph, target)
    graph.meta.pop(SAMPLES, None)
    scripted = script(graph)
    answers.check(scripted, graph if options.dense_dtype != "fp32" else None)
    return ServableModel(
        schema=schema,
        tables=tables,
        plan=plan,
        dense_bytes=dense_bytes(module, found.sources),
        dense_bytes_saved=saved,
        packed=packed,
        eager=eager,
        graph=graph,
        scripted=scripted,
    )


def _check_module(module: nn.Module, options: PackageOptions) -> None:
    if not isinstance(module, nn.Module):
        raise UserError(f"module is a {type(module).__name__}; give a torch.nn.Module")
    parts = dict(module.named_modules())
    known = {*parts, *(type(part).__name__ for part in parts.values())}
    unknown = [name for name in options.leaf_modules if name not in known]
    if unknown:
        names = sorted(parts.keys() - {""})
        near = difflib.get_close_matches(unknown[0], known - {""}, n=3) or names[:5]
        raise UserError(
            f"leaf module {unknown[0]!r} is neither a submodule's qualified name nor its class; "
            f"give one such as {', '.join(near)}"
        )


def _run_sample(packed: nn.Module, arguments: Arguments, output: str) -> dict[str, Tensor]:
    try:
        with torch.inference_mode():
            found = packed(*arguments.values)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the module fails on the sample batch{users_place(error)}: {first_line(error)}; give "
            f"what its forward takes{_odd_dtype(packed)}"
        ) from error
    if output != DEFAULT_OUTPUT and not isinstance(found, Tensor):
        raise UserError(
            f"the output's name is {output!r}, but the module names its outputs itself; leave "
            "the name out"
        )
    return named_outputs(found, output)


def _odd_dtype(packed: nn.Module) -> str:
    """A likely cause: vectors of packaged tables are float32."""
    for name, parameter in packed.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            return (
                f", and layers that take float32 vectors ({name} is {parameter.dtype}; "
                "module.float() changes all of them)"
            )
    return ""


def store_tables(
    sources: Sequence[SourceTable],
    options: PackageOptions,
    *,
    progress: bool = False,
    allocate: Callable[[int], Tensor] | None = None,
) -> tuple[StoredTables, ShardingPlan]:
    """Choose each table's type and place, and store it; refuse choices that do not fit."""
    kinds = choose_types(sources, options.types)
    given = options.plan or (_own_plan(sources) if options.shards == 1 else None)
    if given is not None:
        plan = check_plan(given, sources, kinds, device=options.device)
    else:
        plan = plan_shards(
            sources,
            kinds,
            shards=options.shards,
            device=options.device,
            sharding=options.sharding,
            by_pattern=options.table_sharding,
        )
    rows = sum(table.rows for table in sources)
    with progress_bar("quantize", rows, progress=progress) as bar:
        tables = quantize_tables(
            sources,
            kinds,
            plan=plan,
            for_gpu=options.device == "cuda",
            on_rows=bar.update,
            allocate=allocate,
        )
    return tables, plan


def _own_plan(sources: Sequence[SourceTable]) -> ShardingPlan | None:
    """The plan that sharded quantized collections follow; None where there are none."""
    quantized = [table for table in sources if isinstance(table, QuantizedTable)]
    others = [table for table in sources if isinstance(table, FloatTable)]
    return plan_of_blocks(quantized, one_device(others))


def dense_bytes(model: nn.Module, sources: Sequence[SourceTable]) -> int:
    """Bytes of the parameters that are not tables."""
    tables = {id(table.weights) for table in sources if isinstance(table, FloatTable)}
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
