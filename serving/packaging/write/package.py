"""From a served form to a package file: golden answers, the manifest, the archive."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

import tessera
from tessera.errors import UserError
from tessera.kernels.libraries import fbgemm_version
from tessera.releases import TORCH_BELOW, TORCH_MIN
from tessera.serving.package.evaluation import Evaluation
from tessera.serving.package.golden import golden_info, write_golden
from tessera.serving.package.manifest import (
    FORMAT_VERSION,
    Manifest,
    Versions,
)
from tessera.serving.package.runner import Runner
from tessera.serving.package.signed_record import RecordInfo
from tessera.serving.package.signing import read_private_key, sign_manifest
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.servable import ServableModel
from tessera.serving.packaging.write.archive import write_package
from tessera.serving.packaging.write.golden import golden_batch


def write_servable(
    servable: ServableModel,
    runner: Runner,
    out: Path,
    options: PackageOptions,
    *,
    origin: Origin,
    evaluation: Evaluation | None,
    spilled: Sequence[Tensor] = (),
) -> Manifest:
    """Record golden answers and write the file; a `UserError` where it cannot be written.

    ``runner`` runs the served form as a loader would; ``spilled`` are the tables' buffers that are
    in files.
    """
    inputs = golden_batch(servable.schema)
    answers = runner.forward(inputs)

    backend = lookup_backend(options.backend)
    info = golden_info(inputs, answers, device=options.device, dense_dtype=options.dense_dtype)

    def manifest(records: Mapping[str, RecordInfo]) -> Manifest:
        made = Manifest(
            format_version=FORMAT_VERSION,
            name=options.name,
            version=options.version,
            created=_created(origin),
            versions=Versions(
                tessera=tessera.__version__,
                torch=torch.__version__,
                fbgemm=fbgemm_version(),
                torch_min=TORCH_MIN,
                torch_below=TORCH_BELOW,
            ),
            backend=backend.name,
            operator_libraries=backend.operator_libraries,
            schema=servable.schema,
            dtype=servable.dtype,
            dense_dtype=options.dense_dtype,
            tables=tuple(table.info for table in servable.tables.tables),
            bytes_fp32=servable.bytes_fp32,
            bytes_packaged=servable.bytes_packaged,
            plan=servable.plan,
            device=options.device,
            source=dict(origin.source),
            training_metrics={split: dict(metrics) for split, metrics in origin.metrics.items()},
            evaluation=evaluation,
            golden=info,
            records=dict(records),
        )
        if options.sign_key is None:
            return made
        return sign_manifest(made, read_private_key(options.sign_key))

    golden = write_golden(inputs, answers)
    return write_package(
        out, servable.scripted, golden, manifest, spilled=spilled, allow_ops=options.allow_ops
    )


def _created(origin: Origin) -> str:
    """The manifest's time; SOURCE_DATE_EPOCH overrides it, for builds that must repeat."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return origin.created or iso_time(time.time())
    try:
        return iso_time(float(epoch))
    except (ValueError, OverflowError, OSError) as error:
        raise UserError(f"SOURCE_DATE_EPOCH is {epoch!r}; give seconds since 1970") from error


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as a manifest's time."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
