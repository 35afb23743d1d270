"""Package a module of the user's own: the Python API and what ``--factory`` names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.package.manifest import Manifest, ShardingPlan
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.inputs import DEFAULT_OUTPUT, ModelInputs, read_inputs
from tessera.serving.packaging.lookups.backends import default_backend
from tessera.serving.packaging.module_servable import make_module_servable
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.package import checked_out, write_servable
from tessera.serving.packaging.tables.spill import Spill
from tessera.serving.packaging.type_report import check_place, compare_types, write_report
from tessera.serving.packaging.users_code import first_line, users_place
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

SampleBatch = Sequence[Tensor | KeyedJaggedTensor]
Source = tuple[nn.Module, ModelInputs | None, SampleBatch]


def package_model(
    module: nn.Module,
    schema: ModelInputs | None,
    sample_batch: SampleBatch,
    *,
    out: str | Path,
    name: str | None = None,
    version: str = "1",
    dtype: str = "int8",
    table_dtypes: Mapping[str, str] | None = None,
    max_table_error: float | None = None,
    dense_dtype: str = "fp32",
    backend: str | None = None,
    device: str = "cpu",
    shards: int = 1,
    sharding: str = "auto",
    table_sharding: Mapping[str, str] | None = None,
    plan: ShardingPlan | None = None,
    leaf_modules: Sequence[str] = (),
    sign_key: Path | None = None,
    report: str | Path | None = None,
    progress: bool = False,
) -> Manifest:
    """Quantize, shard, trace, script and package any module with embedding collections.

    Args:
        module: takes, in any order and each at most once, a float32 tensor ``[B, F]``, a
            `KeyedJaggedTensor` and a `KeyedJaggedTensor` with weights; returns a tensor, a
            dictionary of tensors or a `KeyedTensor`, each tensor ``[B]`` or ``[B, k]``.  It is
            left as it is, and packaged in evaluation mode.
        schema: what inputs and outputs are called and how ids are treated; None: the defaults of
            `ModelInputs`.
        sample_batch: the module's arguments for one or more samples.  Only their kinds, names and
            widths count.
        out: the file to make or replace.
        name: the model's name; None: the file's.
        version: its version.
        dtype: how the tables' elements are stored: ``int8``, ``int8b``, ``int4``, ``int2``, ``fp8``,
            ``fp16``, ``bf16`` or ``fp32``.
        table_dtypes: the same for single tables, by a pattern of their names.
        max_table_error: the largest relative RMSE of a table; one that loses more keeps a wider
            type.
        dense_dtype: how the weights of `torch.nn.Linear` layers are stored, ``fp32`` or ``bf16`` (the
            tessera backend only); layers inside ``leaf_modules`` stay float32.
        backend: ``tessera`` or ``fbgemm``; None: the former where it is built.
        device: ``cpu`` or ``cuda``.
        shards: over how many devices the tables are spread.
        sharding: ``auto``, ``table_wise``, ``row_wise`` or ``column_wise``.
        table_sharding: the same for single tables, by a pattern of their names.
        plan: which rows and columns of which table lie in which shard, instead of these three.
        leaf_modules: qualified names or class names of submodules that TorchScript compiles
            whole, because ``torch.fx`` cannot trace them.
        sign_key: a PEM file with the private Ed25519 key to sign with.
        report: write here what every weight type would cost and save: HTML where the name ends
            in ``.html``, text otherwise.
        progress: show a progress bar where stderr is a terminal.

    Returns:
        The manifest that the file now holds.

    Raises:
        UserError: something that cannot be packaged; says what, where and how to go on.
    """
    out = checked_out(out)
    inputs = read_inputs(schema)
    options = PackageOptions(
        name=out.stem if name is None else name,
        version=version,
        dtype=dtype,
        table_dtypes=table_dtypes or {},
        max_table_error=max_table_error,
        dense_dtype=dense_dtype,
        backend=default_backend() if backend is None else backend,
        device=device,
        shards=shards,
        sharding=sharding,
        table_sharding=table_sharding or {},
        plan=plan,
        output=inputs.output,
        leaf_modules=leaf_modules,
        sign_key=sign_key,
    )
    return write_module(
        (module, inputs, sample_batch),
        out,
        options,
        report=None if report is None else Path(report),
        progress=progress,
    )


def write_module(
    source: Source,
    out: str | Path,
    options: PackageOptions,
    *,
    report: Path | None = None,
    progress: bool = False,
) -> Manifest:
    """Package what a factory returned.

    Args:
        source: the module, what its inputs are called, and a sample batch.
        out: the file to make or replace.
        options: see `PackageOptions`.
        report: write here what every weight type would cost and save.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        UserError: something that cannot be packaged, or a file that cannot be written.
    """
    module, schema, sample_batch = source
    inputs = read_inputs(schema)
    if options.output != DEFAULT_OUTPUT:
        inputs = replace(inputs, output=options.output)
    out = checked_out(out)
    if report is not None:
        check_place(report)
        made = compare_types(
            options,
            lambda o: make_module_servable(module, inputs, sample_batch, o),
            lambda *_: None,
        )
        write_report(made, report)
    spill = Spill(out.parent)
    servable = make_module_servable(
        module,
        inputs,
        sample_batch,
        options,
        progress=progress,
        allocate=spill.zeros,
    )
    kind = type(module)
    return write_servable(
        servable,
        TorchScriptRunner(optimize(servable.scripted)),
        out,
        options,
        origin=Origin(source={"module": f"{kind.__module__}.{kind.__qualname__}"}),
        evaluation=None,
        spilled=spill.buffers,
    )


def load_source(name: str) -> Source:
    """Call the factory ``package.module:function``.

    The working directory is searched first.

    Raises:
        UserError: there is no such function, or it returns something else.
    """
    path, colon, function = name.partition(":")
    if not colon or not path or not function:
        raise UserError(f"--factory {name!r} is not of the form pkg.module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        factory = getattr(importlib.import_module(path), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--factory {name}: {error}; give pkg.module:function") from error
    except Exception as error:
        raise UserError(_failed(name, error)) from error
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UserError(f"--factory {name}: {error}; name a function without arguments") from error
    except ValueError:
        pass  # some functions written in C do not say what they take
    try:
        made = factory()
    except UserError:
        raise
    except Exception as error:
        raise UserError(_failed(name, error)) from error
    if not (
        isinstance(made, tuple)
        and len(made) == 3
        and isinstance(made[0], nn.Module)
        and isinstance(made[1], ModelInputs | None)
    ):
        raise UserError(
            f"--factory {name} returned {type(made).__name__}; let it return the module, a "
            "ModelInputs (or None) and the sample batch"
        )
    return made


def _failed(name: str, error: Exception) -> str:
    return f"--factory {name} fails{users_place(error)}: {first_line(error)}; correct it there"
