"""A version in memory, with the commits that it has taken: what a publisher compares with and adds to.

Servers have a state of their own, which answers calls meanwhile; here nobody looks while bytes change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.kernels.libraries import load_libraries
from tessera.serving.commits.chain import LogState
from tessera.serving.commits.file import Bytes, ReadCommit
from tessera.serving.commits.patching import apply_patch
from tessera.serving.package.golden import read_golden
from tessera.serving.package.loading import Loading, check_torch
from tessera.serving.package.manifest import GOLDEN_RECORD, Manifest
from tessera.serving.package.opening import storage_memory
from tessera.serving.package.records import Records
from tessera.serving.package.runner import HostBatch, TorchScriptRunner
from tessera.serving.package.signed_record import unsigned_sha256


class VersionState:
    """The records and the module of a package on the CPU, which share their memory.

    Args:
        path: the package.
        model: the model's name, that of its folder.
        version: the version's number.
        allow_ops: operators that its graph may call beside those that every package may.

    Attributes:
        records: the package's file.
        manifest: the package's.
        log: where the version stands.
        tensors: by record ``data/N``, its bytes; those of the module's parameters and buffers alone.
        dtypes: of the tensors, by record.
        tensor_records: by the name of a parameter or buffer, its record.

    Raises:
        PackageError: the package is missing or damaged, or cannot be loaded here.
    """

    def __init__(
        self, path: Path, model: str, version: int, *, allow_ops: Collection[str] = ()
    ) -> None:
        loading = Loading(
            path, devices=["cpu"] * Records(path).manifest().plan.num_shards, allow_ops=allow_ops
        )
        loading.read()
        self.records = loading.records
        self.manifest: Manifest = loading.manifest
        check_torch(path, self.manifest)
        load_libraries(self.manifest.operator_libraries)
        self._inputs, _ = read_golden(loading.opening.content(GOLDEN_RECORD))
        self.tensor_records = loading.opening.tensor_records()
        module = loading.opening.module(loading.devices)
        tensors: dict[str, Tensor] = dict(
            [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
        )
        self.tensors: dict[str, Bytes] = {
            record: storage_memory(tensors[name].detach())
            for name, record in self.tensor_records.items()
        }
        self.dtypes = {record: tensors[name].dtype for name, record in self.tensor_records.items()}
        # Not frozen: its constants would be copies for some graphs.
        self._runner = TorchScriptRunner(module.eval())
        base = unsigned_sha256(self.records.manifest_bytes())
        self.log = LogState(model=model, version=version, base=base, number=0, sha256=base)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each record that a commit may patch."""
        return {name: len(content) for name, content in self.tensors.items()}

    def apply(self, read: ReadCommit) -> list[tuple[NDArray[np.int64] | None, Bytes]]:
        """Take a commit, which is the next one.

        Returns:
            What `undo` needs: of each patch its rows and what they held.

        Raises:
            ValueError: it does not fit the package; nothing has changed.
        """
        read.check_fits(self.sizes)
        old = []
        for patch in read.commit.patches:
            rows = read.rows(patch)
            old.append(
                (rows, apply_patch(self.tensors[patch.record], patch, rows, read.new_bytes(patch)))
            )
        self.log = replace(self.log, number=read.commit.number, sha256=read.sha256)
        return old

    def undo(
        self,
        read: ReadCommit,
        old: list[tuple[NDArray[np.int64] | None, Bytes]],
        before: LogState,
    ) -> None:
        """Take back what `apply` of the last commit did."""
        for patch, (rows, content) in reversed(list(zip(read.commit.patches, old, strict=True))):
            apply_patch(self.tensors[patch.record], patch, rows, content)
        self.log = before

    def answers(self) -> tuple[HostBatch, dict[str, Tensor]]:
        """The package's golden inputs and what the state answers to them."""
        return self._inputs, self.forward(self._inputs)

    def forward(self, batch: HostBatch) -> dict[str, Tensor]:
        """What the state answers to a batch."""
        return self._runner.forward(batch)
