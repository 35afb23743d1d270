"""Where the server gets its models: from package files, or from a test's own loader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tessera.serving.loading import load_package
from tessera.serving.records import Records
from tessera.serving.runner import Runner
from tessera.serving.schema import InputSchema
from tessera.serving.server.config import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model's name as requests use it, and its version."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that has passed every check.

    Attributes:
        schema: what it takes and gives.
        runner: computes its scores.
        sha256: of the whole file.
        torch: the torch version that made it.
        dtype: the weight type of its tables.
        device: where it runs.
        table_bytes: bytes of its tables in memory.
        load_seconds: how long loading took.
    """

    schema: InputSchema
    runner: Runner
    sha256: str
    torch: str
    dtype: str
    device: str
    table_bytes: int
    load_seconds: float


class ModelLoader(Protocol):
    """What the server needs of a source of models; both calls may block."""

    def identify(self, source: ModelSource) -> ModelIdentity:
        """Name and version, without loading."""
        ...

    def load(self, source: ModelSource) -> LoadedModel:
        """The model itself; raises `UserError` where the package cannot be served."""
        ...


class PackageLoader:
    """Loads package files.

    Args:
        verify_golden: replay the golden answers before serving.
    """

    def __init__(self, *, verify_golden: bool) -> None:
        self._verify_golden = verify_golden

    def identify(self, source: ModelSource) -> ModelIdentity:
        """See `ModelLoader`."""
        manifest = Records(Path(source.path)).manifest()
        return ModelIdentity(name=source.name or manifest.name, version=manifest.version)

    def load(self, source: ModelSource) -> LoadedModel:
        """See `ModelLoader`."""
        package = load_package(source.path, verify_golden=self._verify_golden)
        manifest = package.manifest
        return LoadedModel(
            schema=manifest.schema,
            runner=package.runner,
            sha256=package.sha256,
            torch=manifest.versions.torch,
            dtype=manifest.dtype,
            device=manifest.device,
            table_bytes=sum(table.bytes for table in manifest.tables),
            load_seconds=package.load_seconds,
        )
