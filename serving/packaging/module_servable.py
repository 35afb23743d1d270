"""Any module in its served form."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.kernels.libraries import load_libraries
from tessera.serving.package.runner import TorchScriptRunner, zero_batch
from tessera.serving.packaging.dense import (
    fuse_relus,
    input_dimensions,
    panel_layers,
)
from tessera.serving.packaging.dense_gpu import keep_narrow, narrow_layers
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.find import find_hash_specs, find_tables
from tessera.serving.packaging.inputs import (
    DEFAULT_OUTPUT,
    Arguments,
    ModelInputs,
    module_schema,
    named_outputs,
    output_specs,
    read_arguments,
    treatments,
)
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.module_predict import ModulePredict
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.packed_collections import packed_collection
from tessera.serving.packaging.packed_positions import packed_positions
from tessera.serving.packaging.script import script
from tessera.serving.packaging.servable import ServableModel, dense_bytes, store_tables
from tessera.serving.packaging.trace import is_left_whole, trace
from tessera.serving.packaging.users_code import first_line, users_place
from tessera.serving.packaging.write.golden import LONG_BAG, golden_batch, long_batch
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# Two ways through the same operators; a difference beyond this is another calculation.
_SAME_ANSWERS = 1e-4
# Ids of a bag that a module must stand; beyond them nobody tries.
_LONGEST_BAG = 2000


@dataclass(frozen=True, kw_only=True)
class ServableModule(ServableModel):
    """A user's module in its served form.

    Attributes:
        packed: the module with stored tables and packed layers in the place of its own; takes what
            the module takes, raw ids instead of rows where a `FeatureRule` says so.  A package
            of the tessera backend for one CPU answers as this does, bit for bit.
    """

    packed: nn.Module


def make_module_servable(
    module: nn.Module,
    inputs: ModelInputs,
    sample_batch: Sequence[Tensor | KeyedJaggedTensor],
    options: PackageOptions,
    *,
    progress: bool = False,
    allocate: Callable[[int], Tensor] | None = None,
) -> ServableModule:
    """Quantize, trace and script a user's module, without writing a package.

    Args:
        module: left as it is.
        inputs: what its inputs are called.
        sample_batch: its arguments for some samples; see `tessera.serving.packaging.inputs`.
        options: see `PackageOptions`.
        progress: show a progress bar where stderr is a terminal.
        allocate: see `tessera.serving.packaging.tables.quantize.quantize_tables`.

    Raises:
        UserError: something that cannot be packaged; says what and how to go on.
    """
    _check_module(module, options)
    backend = lookup_backend(options.backend)
    load_libraries(backend.operator_libraries)
    arguments = read_arguments(sample_batch)
    found = find_tables(module)
    specs = find_hash_specs(module)
    # A first schema without outputs: they are seen when the module runs.
    schema = module_schema(inputs, arguments, found, specs, ())
    tables, plan = store_tables(found.floats, options, progress=progress, allocate=allocate)
    memo: dict[int, object] = {
        id(collection.module): packed_collection(
            collection, tables, treatments(schema, specs), backend
        )
        for collection in found.collections
    }
    memo |= packed_positions(module)
    packed = copy.deepcopy(module, memo).eval().requires_grad_(requires_grad=False)
    outputs, saved = _run_sample(packed, arguments, options, inputs.output)
    schema = module_schema(
        inputs, arguments, found, specs, output_specs(outputs, arguments.batch_size)
    )
    eager = ModulePredict(packed, arguments.kinds, schema, outputs).eval()
    graph = trace(eager, leaf_modules=options.leaf_modules)
    fuse_relus(graph)
    keep_narrow(graph)
    servable = ServableModule(
        schema=schema,
        tables=tables,
        plan=plan,
        dense_bytes=dense_bytes(module, found.floats),
        dense_bytes_saved=saved,
        eager=eager,
        graph=graph,
        scripted=script(graph, device=options.device),
        packed=packed,
    )
    _check(servable)
    return servable


def _check_module(module: nn.Module, options: PackageOptions) -> None:
    """Refuse what is no module, and leaf modules that it has not."""
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


def _run_sample(
    packed: nn.Module, arguments: Arguments, options: PackageOptions, output: str
) -> tuple[dict[str, Tensor], int]:
    """The module's outputs for the sample batch; swaps its dense layers on the way.

    The second result is by how many bytes that made their weights smaller.

    Raises:
        UserError: the module fails.
    """
    results: list[dict[str, Tensor]] = []

    def run() -> None:
        with torch.inference_mode():
            found = packed(*arguments.values)
        if output != DEFAULT_OUTPUT and not isinstance(found, Tensor):
            raise UserError(
                f"the output's name is {output!r}, but the module names its outputs itself; leave "
                "the name out"
            )
        results.append(named_outputs(found, output))

    whole = [
        part
        for name, leaf in packed.named_modules()
        if is_left_whole(leaf, name, options.leaf_modules)
        for part in leaf.modules()
    ]
    try:
        dimensions = input_dimensions(packed, run, lambda layer: layer not in whole)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the module fails on the sample batch{users_place(error)}: {first_line(error)}; give "
            f"what its forward takes{_odd_dtype(packed)}"
        ) from error
    saved = 0
    for layer, stand_in in _stand_ins(dimensions, options).items():
        _replace(packed, layer, stand_in)
        saved += DENSE_TYPES[options.dense_dtype].saved_bytes(layer.weight)
    return results[0], saved


def _odd_dtype(packed: nn.Module) -> str:
    """A likely cause: vectors of packaged tables are float32."""
    for name, parameter in packed.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            return (
                f", and layers that take float32 vectors ({name} is {parameter.dtype}; "
                "module.float() changes all of them)"
            )
    return ""


def _stand_ins(
    dimensions: dict[nn.Linear, set[int]], options: PackageOptions
) -> Mapping[nn.Linear, nn.Module]:
    """What computes the dense layers; those left out stay torch's float32 ones."""
    if options.device == "cuda":
        return narrow_layers(dimensions) if options.dense_dtype == "bf16" else {}
    return panel_layers(dimensions, options.dense_dtype) if options.backend == "tessera" else {}


def _replace(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _check(servable: ServableModule) -> None:
    """Hold the scripted module against the eager one at batch sizes it was not traced with.

    Raises:
        UserError: it fails, gives a NaN, or depends on the batch size.
    """
    scripted = TorchScriptRunner(servable.scripted)
    golden = golden_batch(servable.schema)
    batches = {
        f"a batch of {golden.batch_size} samples with empty bags (sample 0), the lowest and highest "
        f"ids (1 to 3) and bags of {LONG_BAG} ids (4)": golden,
        "a batch of one sample": zero_batch(servable.schema, 1, wide_ids=True),
        f"bags of {_LONGEST_BAG} ids": long_batch(servable.schema, _LONGEST_BAG),
    }
    for what, batch in batches.items():
        try:
            expected = TorchScriptRunner(servable.eager).forward(batch)
        except Exception as error:
            raise UserError(
                f"the module fails on {what}{users_place(error)}: {first_line(error)}; every such "
                "request must have an answer: take the number of samples from the arguments, cut "
                "long bags and bound what is used as an index"
            ) from error
        found = scripted.forward(batch)
        for name, value in expected.items():
            _check_output(name, found[name], value, what)


def _check_output(name: str, found: Tensor, expected: Tensor, batch: str) -> None:
    if bool(torch.isnan(expected).any()):
        row = int(torch.nonzero(torch.isnan(expected).reshape(len(expected), -1).any(dim=1))[0])
        raise UserError(
            f"output {name!r} is NaN for sample {row} of {batch}; let the module give a number for "
            "every request"
        )
    bound = _SAME_ANSWERS * max(1.0, float(expected.abs().max()))
    if found.shape != expected.shape or bool((found - expected).abs().max() > bound):
        raise UserError(
            f"output {name!r} of {batch} differs between the module and its traced graph, which "
            "has a number of the sample batch or of a constant in it; take batch sizes from the "
            "arguments' own shapes inside forward"
        )
