"""From a package file to something that answers: check everything, then open, then warm up.

The order is the safety: the file is read as a plain archive, its manifest understood, its signature
checked where that is asked, every record's hash compared, the operator libraries loaded, and only
then does torch open what was checked.  Large tables for GPUs, which torch does not open, are read and compared behind
that, and before anything of the model is called.  A file that fails a check has run nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.serving.package.devices import bytes_by_device, default_devices, on_host
from tessera.serving.package.golden import GoldenMismatchError, replay_golden
from tessera.serving.package.hashes import FileHash
from tessera.serving.package.manifest import GOLDEN_RECORD, Manifest
from tessera.serving.package.opening import Memory, Opening
from tessera.serving.package.own_weights import lie_alike, own_bytes, with_own_weights
from tessera.serving.package.pace import no_rest
from tessera.serving.package.record_memory import memory_of_records
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.runner import Runner, TorchScriptRunner, as_shared, zero_batch
from tessera.serving.package.time_limit import TimeLimit, limited
from tessera.serving.package.torchscript import last_line, optimize
from tessera.serving.package.vocabulary import Vocabularies

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

__all__ = ["LoadedPackage", "PackageError", "cpu_instead", "load_package", "open_checked"]

# TorchScript's executor plans anew for the first calls it sees of a kind: it profiles one,
# optimizes at the second, and the third is the steady state.
_WARM_UP_CALLS = 3
_WARM_UP_BATCH_SIZES = (1, 2, 8, 64)
_MOST_OWN, _LEAST_OWN_BYTES = 1 / 8, 64 << 20
"""A second instance's weights may take this share of the bytes of tables, and so many bytes in any case."""


@dataclass(frozen=True, kw_only=True)
class LoadedPackage:
    """A package that has passed every check and is ready for its first request.

    Attributes:
        manifest: what the package says of itself.
        runner: scores batches; may be called from several threads at once.
        records: its records.
        file_hash: SHA-256 of the whole file; may not be known yet.
        table_bytes: bytes of the tables by device, such as ``cpu`` and ``cuda:0``.
        vocabularies: the ids that the training rows had, of features with a vocabulary; None: the
            model has none.
        load_seconds: time from opening the file to being ready.
        path: the file.
    """

    manifest: Manifest
    runner: Runner
    records: Records
    file_hash: FileHash
    table_bytes: Mapping[str, int]
    vocabularies: Vocabularies | None
    load_seconds: float
    path: Path

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole file, lower-case hex; waits until it is known."""
        return self.file_hash.wait()


def cpu_instead(path: str | Path) -> list[str] | None:
    """``devices`` for looking into a package anywhere: the CPU for one for GPUs where there is none.

    None where the package's own devices are there.

    Raises:
        PackageError: the file cannot be read, or is not a package.
    """
    manifest = Records(Path(path)).manifest()
    if manifest.device == "cpu" or torch.cuda.is_available():
        return None
    return ["cpu"] * manifest.plan.num_shards


def load_package(
    path: str | Path,
    *,
    device: str | None = None,
    devices: Sequence[str] | None = None,
    verify_golden: bool = True,
    trusted_keys: Sequence[Ed25519PublicKey] | None = None,
    copy_of: LoadedPackage | None = None,
    allow_ops: Collection[str] = (),
    time_limit: TimeLimit | None = None,
) -> LoadedPackage:
    """Check, open and warm up the package at ``path``.

    Side effect: see `tessera.serving.package.torchscript.optimize`.

    Args:
        path: a MODEL.pt that ``package-model`` wrote.
        device: the kind of device that the package must be made for; None: either.
        devices: the device of each shard, such as ``["cuda:2", "cuda:3"]`` (a package for GPUs
            runs on ``cpu``, too); None: the CPU, or the first GPUs, in turns where there are fewer
            than shards.
        verify_golden: replay the golden answers and compare.
        trusted_keys: the public keys of which one must have signed the package; None: signatures
            are not looked at.
        copy_of: the same file, loaded before; its file's hash is not computed again.
        allow_ops: operators that its graph may call beside `ALLOWED_OPERATORS`.
        time_limit: what its own code may take, reading not counted; then this process ends.  None: as long as it
            likes.

    Raises:
        PackageError: the file is missing, damaged or changed, is not signed as asked, was made for
            another device or torch, needs devices that are not here or an operator library that
            cannot be loaded, or does not give its golden answers.
    """
    begin = time.perf_counter()
    loading = Loading(
        Path(path), device=device, devices=devices, trusted_keys=trusted_keys, allow_ops=allow_ops
    )
    limit = limited(time_limit, loading.path)
    loading.read()
    contents = loading.opening.contents() if copy_of is None else {}
    with limit:
        loading.open()
    loading.read_tables()
    # Not sooner, as it would read tables for GPUs from the disk at the same time.
    file_hash = loading.file_hash(contents) if copy_of is None else copy_of.file_hash
    with limit:
        loading.build()
        loading.settle(verify_golden=verify_golden)
    return loading.package(file_hash, time.perf_counter() - begin)


@dataclass(frozen=True, kw_only=True)
class SecondInstance:
    """A second instance of a model; see `Loading.second`.

    Attributes:
        runner: scores batches.
        memory: see `Loading.patchable_memory`; that of tables is the first instance's.
    """

    runner: Runner
    memory: Mapping[str, Sequence[Tensor]]


class Loading:
    """The steps of `load_package`, to be taken in their order; each on any thread.

    They are `read`, `open`, `read_tables`, `build` and `settle`.  A server that goes on answering takes each at a
    priority of its own, and lets ``rest`` pause between the parts of a step: each has the interpreter's lock for some
    milliseconds, and calls that have waited for one part are answered before the next begins.

    Args:
        path: see `load_package`, as the others.
        device: of the package.
        devices: of its shards.
        trusted_keys: one of which must have signed it.
        allow_ops: that its graph may call.
        memory: see `Opening`.
        patchable: leave the graph as it is, so that its tensors' bytes can be replaced (`patchable_memory`).

    Attributes:
        on_host: whether all tensors stay in the host's memory.

    Raises:
        PackageError: by what the file's manifest and headers say, it is not served; nothing else was read.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str | None = None,
        devices: Sequence[str] | None = None,
        trusted_keys: Sequence[Ed25519PublicKey] | None = None,
        allow_ops: Collection[str] = (),
        memory: Memory | None = None,
        patchable: bool = False,
    ) -> None:
        self.path = path
        self._patchable = patchable
        self._tensor_records: Mapping[str, str] = {}
        self.records = Records(path)
        self.manifest = _trusted_manifest(self.records, trusted_keys)
        if device not in {None, self.manifest.device}:
            raise PackageError(
                path, f"was packaged for device {self.manifest.device!r}, asked for is {device!r}"
            )
        self.devices = _devices(path, self.manifest, devices)
        check_torch(path, self.manifest)
        self.on_host = on_host(self.devices)
        self.opening = Opening(
            self.records, on_host=self.on_host, allow_ops=allow_ops, memory=memory
        )
        self._golden: bytes | None = None
        self._module: Any = None
        self._runner: TorchScriptRunner | None = None
        self._vocabularies: Vocabularies | None = None

    def read(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read every record but large tables for GPUs, and compare it with its hash.

        Args:
            progress: told each part's bytes, from several threads.

        Raises:
            PackageError: a record is missing or was changed.
        """
        self.records.check_some(
            self.opening.listed_first(), into=self.opening.into, progress=progress
        )

    def file_hash(self, contents: Mapping[str, bytes | memoryview]) -> FileHash:
        """SHA-256 of the file, computed in the background of ``contents``, which `read` has kept, and of the file."""
        return FileHash(functools.partial(self.records.file_sha256, contents))

    def hash_again(self) -> FileHash:
        """As `file_hash`, of what is read again: nothing of what was kept is held for it."""
        return self.file_hash({})

    def open(self, rest: Callable[[], None] = no_rest) -> None:
        """Let torch open the module; what `read` reads must have been read.

        Args:
            rest: called between its parts.

        Raises:
            PackageError: an operator library cannot be loaded, or torch cannot open what was read.
        """
        self.load_libraries()
        self._golden = self.opening.content(GOLDEN_RECORD)
        if self._patchable:
            self._tensor_records = self.opening.tensor_records()
        rest()
        self.opening.open(rest)

    def read_tables(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read the large tables for GPUs to their devices, and compare them with their hashes.

        Nothing is done where tables stay in the host's memory: `read` has read them.

        Args:
            progress: told each part's bytes, from several threads.

        Raises:
            PackageError: a table was changed; the memory of all of them has been freed.
        """
        self.opening.read_tables(self.devices, progress)

    def build(self, rest: Callable[[], None] = no_rest) -> None:
        """Make the model, which is the first that runs of the package.

        Takes `open` and `read_tables` where they have not been taken.

        Args:
            rest: called between its parts.

        Raises:
            PackageError: see `open` and `read_tables`.
        """
        if self._golden is None:
            self.open()
        self._module = self.opening.module(self.devices)
        self._vocabularies = Vocabularies.of(self._module)
        rest()
        # Frozen, tensors become constants: equal ones are merged, and others computed from them.
        module = self._module.eval() if self._patchable else optimize(self._module)
        self._runner = TorchScriptRunner(module)

    def patchable_memory(self) -> dict[str, list[Tensor]]:
        """What the model, built ``patchable``, reads at each call; see `memory_of_records`."""
        sizes = {entry.name: entry.bytes for entry in self.records.entries}
        return memory_of_records(self._module, self._tensor_records, sizes)

    def second(self) -> SecondInstance | None:
        """A second instance of the model, built ``patchable`` for the CPU, with the same tables and weights of its own.

        None: its weights would take more memory than `_MOST_OWN` says, or it holds what cannot be copied.  To be called
        before anyone else calls the model.
        """
        most = max(_LEAST_OWN_BYTES, int(_MOST_OWN * sum(t.bytes for t in self.manifest.tables)))
        if own_bytes(self._module) > most:
            return None
        try:
            module = with_own_weights(self._module)
        except RuntimeError:
            return None
        sizes = {entry.name: entry.bytes for entry in self.records.entries}
        memory = memory_of_records(module, self._tensor_records, sizes)
        if not lie_alike(self.patchable_memory(), memory):
            return None
        return SecondInstance(runner=TorchScriptRunner(module), memory=memory)

    @property
    def runner(self) -> Runner:
        """The model that was built."""
        assert self._runner is not None
        return self._runner

    def load_libraries(self) -> None:
        """Load the operators that the package calls.

        Raises:
            PackageError: a library cannot be loaded.
        """
        try:
            load_libraries(self.manifest.operator_libraries)
        except LibraryError as error:
            raise PackageError(self.path, str(error)) from error

    def settle(self, *, verify_golden: bool, rest: Callable[[], None] = no_rest) -> None:
        """Call the model until its executor has settled, and compare its golden answers where asked.

        Args:
            verify_golden: see `load_package`.
            rest: called behind each call of the model.

        Raises:
            PackageError: it cannot be called, or gives other answers.
        """
        assert self._runner is not None
        assert self._golden is not None
        try:
            warm_up(self._runner, self.manifest, rest)
        except RuntimeError as error:
            raise PackageError(self.path, f"cannot be called: {last_line(error)}") from error
        if verify_golden:
            _replay(self.path, self._runner, self._golden, self.manifest)

    def package(self, file_hash: FileHash, load_seconds: float) -> LoadedPackage:
        """What the steps have made."""
        assert self._runner is not None
        if self.on_host:
            table_bytes = {"cpu": sum(table.bytes for table in self.manifest.tables)}
        else:
            table_bytes = bytes_by_device(self._module)
        return LoadedPackage(
            manifest=self.manifest,
            runner=self._runner,
            records=self.records,
            file_hash=file_hash,
            table_bytes=table_bytes,
            vocabularies=self._vocabularies,
            load_seconds=load_seconds,
            path=self.path,
        )


def _replay(path: Path, runner: Runner, golden: bytes, manifest: Manifest) -> None:
    try:
        replay_golden(runner, golden, manifest.golden)
    except GoldenMismatchError as error:
        raise PackageError(path, f"does not give its golden answers: {error}") from error
    except ValueError as error:
        raise PackageError(path, str(error)) from error
    except RuntimeError as error:
        raise PackageError(path, f"cannot be called: {last_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class CheckedPackage:
    """A package of which every byte is as it was written; nothing of it has run.

    Attributes:
        records: its records.
        manifest: what it says of itself.
    """

    records: Records
    manifest: Manifest

    def sha256(self) -> str:
        """SHA-256 of the whole file, lower-case hex; reads it again."""
        return self.records.file_sha256({})


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """A package's module, opened on the CPU and not called.

    Attributes:
        manifest: what the package says of itself.
        module: the scripted module as it was written.
    """

    manifest: Manifest
    module: Any


def open_module(path: Path) -> CheckedModule:
    """Check a package as `load_package` does, and open its module to look at its buffers.

    Raises:
        PackageError: see `load_package`.
    """
    shards = Records(path).manifest().plan.num_shards
    loading = Loading(path, devices=["cpu"] * shards)
    loading.read()
    loading.load_libraries()
    return CheckedModule(manifest=loading.manifest, module=loading.opening.module(loading.devices))


def open_checked(
    path: Path, trusted_keys: Sequence[Ed25519PublicKey] | None = None
) -> CheckedPackage:
    """Read the file as an archive; check its signature if asked, and compare every record.

    Raises:
        PackageError: see `load_package`.
    """
    records = Records(path)
    manifest = _trusted_manifest(records, trusted_keys)
    records.check(manifest.records)
    return CheckedPackage(records=records, manifest=manifest)


def _trusted_manifest(
    records: Records, trusted_keys: Sequence[Ed25519PublicKey] | None
) -> Manifest:
    manifest = records.manifest()
    if trusted_keys is not None:
        # Only who asks for signatures needs the library.
        from tessera.serving.package.signing import SignatureError, check_signature  # noqa: PLC0415

        try:
            check_signature(records.manifest_bytes(), trusted_keys)
        except SignatureError as error:
            raise PackageError(records.path, str(error)) from error
    return manifest


def check_torch(path: Path, manifest: Manifest) -> None:
    """Refuse a package that this torch may not run.

    Raises:
        PackageError: the running torch is outside the manifest's range.
    """
    versions = manifest.versions
    running = _major_minor(torch.__version__)
    try:
        oldest, below = _major_minor(versions.torch_min), _major_minor(versions.torch_below)
    except ValueError as error:
        raise PackageError(path, f"the manifest's torch range cannot be read: {error}") from error
    if not oldest <= running < below:
        raise PackageError(
            path,
            f"needs torch >={versions.torch_min},<{versions.torch_below}, running is "
            f"{torch.__version__}; install a torch of that range or package the model again",
        )


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _devices(path: Path, manifest: Manifest, asked: Sequence[str] | None) -> list[str]:
    """The device of each shard."""
    shards = manifest.plan.num_shards
    if asked is None:
        try:
            return default_devices(manifest.device, shards)
        except ValueError as error:
            raise PackageError(path, f"cannot be loaded: {error}") from error
    if len(asked) != shards:
        raise PackageError(
            path, f"has {shards} shards, and {len(asked)} devices were given; give one for each"
        )
    if manifest.device == "cpu" and set(asked) != {"cpu"}:
        raise PackageError(
            path,
            f"was packaged for device 'cpu', asked for is {asked[0]!r}; package it with "
            "--device cuda",
        )
    return list(asked)


def warm_up(runner: Runner, manifest: Manifest, rest: Callable[[], None] = no_rest) -> None:
    """Call the model until its executor has settled, with ids of both widths, and ``rest`` behind each call."""
    for batch_size in _WARM_UP_BATCH_SIZES:
        for wide_ids in (False, True):
            batch = zero_batch(manifest.schema, batch_size, wide_ids=wide_ids)
            forms = [batch, as_shared(batch)] if runner.shares_rows else [batch]
            for form in forms:
                for _ in range(_WARM_UP_CALLS):
                    runner.forward(form)
                    rest()
