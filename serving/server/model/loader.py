"""Where the server gets its models: from package files, or from a test's own loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.serving.package.archive import FileIdentity
from tessera.serving.package.hashes import FileHash
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.runner import Runner
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.time_limit import DEFAULT_LOAD_TIMEOUT_S, TimeLimit
from tessera.serving.package.vocabulary import Vocabularies
from tessera.serving.server.config import ModelSource, ServerConfig
from tessera.serving.server.follow.followed_model import FollowedModel
from tessera.serving.server.metrics.counted_names import NO_NAMES, CountedNames
from tessera.serving.server.model.replicas import Replicas, devices_of_replicas

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model's name as requests use it, its version, and whose values are counted."""

    name: str
    version: str
    counted: CountedNames = NO_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """What a model was loaded from that can be kept for when its version comes again.

    Attributes:
        file: its package's identity.
        tables: its large tables.
    """

    file: FileIdentity
    tables: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that has passed every check.

    Attributes:
        schema: what it takes and gives.
        vocabularies: the ids that its vocabularies hold, if it has some.
        runner: computes its scores.
        file_hash: of the package's file; may not be known yet.
        torch: the torch version that made it.
        dtype: the weight type of its tables.
        device: where it runs, ``cpu`` or ``cuda``.
        devices: of each replica, the device that its batches come to, such as ``cpu`` and ``cuda:0``.
        table_bytes: bytes of its tables by device, such as ``cpu`` and ``cuda:0``.
        load_seconds: how long loading took.
        followed: what commits change; None: nothing does.
        origin: what it was loaded from; None: it cannot be kept.
    """

    schema: InputSchema
    runner: Runner
    file_hash: FileHash
    torch: str
    dtype: str
    device: str
    devices: tuple[str, ...]
    table_bytes: Mapping[str, int]
    load_seconds: float
    vocabularies: Vocabularies | None = None
    followed: FollowedModel | None = None
    origin: ModelOrigin | None = None


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
        allow_ops: operators that its graph may call beside those that every package may.
        load_timeout_s: what its own code may take; then the process ends.
        public_keys: PEM files; one of these keys must have signed a package.  Empty: signatures
            are not looked at.
        gpus: see `ServerConfig`.

    Raises:
        UserError: a file of ``public_keys`` does not hold a public key.
    """

    def __init__(
        self,
        *,
        verify_golden: bool,
        allow_ops: Sequence[str] = (),
        load_timeout_s: float = DEFAULT_LOAD_TIMEOUT_S,
        public_keys: Sequence[str] = (),
        gpus: Sequence[int] = (),
    ) -> None:
        self._verify_golden = verify_golden
        self._allow_ops = allow_ops
        self._time_limit = TimeLimit(
            seconds=load_timeout_s, prefix="tessera serve: error: ", status=2
        )
        self._gpus = gpus
        self._trusted: Sequence[Ed25519PublicKey] | None = None
        if public_keys:
            # Only who asks for signatures needs the library.
            from tessera.serving.package.signing import read_public_key  # noqa: PLC0415

            self._trusted = [read_public_key(path) for path in public_keys]

    @classmethod
    def of(cls, config: ServerConfig) -> PackageLoader:
        """The loader of a server with this configuration.

        Raises:
            UserError: a file of ``public_keys`` does not hold a public key.
        """
        return cls(
            verify_golden=config.verify_golden,
            allow_ops=config.allow_ops,
            load_timeout_s=config.load_timeout_s,
            public_keys=config.public_keys,
            gpus=config.gpus,
        )

    @property
    def trusted_keys(self) -> Sequence[Ed25519PublicKey] | None:
        """One of these must have signed a package; None: signatures are not looked at."""
        return self._trusted

    def identify(self, source: ModelSource) -> ModelIdentity:
        """The name and version of the package, read from its manifest alone."""
        manifest = Records(Path(source.path)).manifest()
        return ModelIdentity(
            name=source.name or manifest.name,
            version=manifest.version,
            counted=CountedNames.of(manifest.schema),
        )

    def load(self, source: ModelSource) -> LoadedModel:
        """Load the package on every device that it is to be served on."""
        packages: list[LoadedPackage] = []
        names: list[str] = []
        for devices in self.replica_devices(Path(source.path)):
            packages.append(
                load_package(
                    source.path,
                    devices=devices,
                    verify_golden=self._verify_golden,
                    allow_ops=self._allow_ops,
                    time_limit=self._time_limit,
                    trusted_keys=self._trusted,
                    copy_of=packages[0] if packages else None,
                )
            )
            names.append(devices[0] if devices else packages[-1].manifest.device)
        return loaded_model(packages, names)

    def replica_devices(self, path: Path) -> list[list[str] | None]:
        """For each replica of the model, the device of each shard; None: as the package says."""
        manifest = Records(path).manifest()
        if manifest.device == "cpu":
            return [None]
        found = torch.cuda.device_count()
        gpus = self._gpus or range(found)
        missing = [gpu for gpu in gpus if gpu >= found]
        if missing:
            raise PackageError(
                path,
                f"was to be served on GPU {missing[0]}, but there are {found} here, numbered from 0; "
                "change --gpus",
            )
        return list(
            devices_of_replicas([f"cuda:{gpu}" for gpu in gpus], manifest.plan.num_shards)
        ) or [None]


def loaded_model(packages: Sequence[LoadedPackage], devices: Sequence[str]) -> LoadedModel:
    """The model of ``packages``, its replicas; of each, the device that its batches come to."""
    package, runners = packages[0], [package.runner for package in packages]
    manifest = package.manifest
    return LoadedModel(
        schema=manifest.schema,
        runner=runners[0] if len(runners) == 1 else Replicas(runners),
        file_hash=package.file_hash,
        torch=manifest.versions.torch,
        dtype=manifest.dtype,
        device=manifest.device,
        devices=tuple(devices),
        table_bytes=sum((Counter(package.table_bytes) for package in packages), Counter()),
        vocabularies=package.vocabularies,
        load_seconds=sum(package.load_seconds for package in packages),
    )


def identify_all(
    sources: tuple[ModelSource, ...], loader: ModelLoader
) -> list[tuple[ModelSource, ModelIdentity]]:
    """The name and version of each of ``sources``.

    Raises:
        UserError: a package cannot be read, or two models have the same name.
    """
    models = [(source, loader.identify(source)) for source in sources]
    seen: dict[str, str] = {}
    for source, identity in models:
        if identity.name in seen:
            raise UserError(
                f"--model: {seen[identity.name]} and {source.path} are both named "
                f"{identity.name!r}; give one another name with --model NAME={source.path}"
            )
        seen[identity.name] = source.path
    return models


class LoadedBefore:
    """Gives the models that this process's parent has loaded.

    Args:
        identities: of each package, its model's name and version.
        models: by name.
    """

    def __init__(
        self, identities: Mapping[ModelSource, ModelIdentity], models: Mapping[str, LoadedModel]
    ) -> None:
        self._identities = identities
        self._models = models

    def identify(self, source: ModelSource) -> ModelIdentity:
        """The name and version of the package."""
        return self._identities[source]

    def load(self, source: ModelSource) -> LoadedModel:
        """Give the model that was loaded for ``source``."""
        return self._models[self._identities[source].name]


def log_file_hash(log: Any, identity: ModelIdentity, model: LoadedModel) -> None:
    """Tell ``log`` the hash of the model's file once it is known."""
    told = log.bind(model=identity.name, version=identity.version)
    model.file_hash.tell(
        lambda sha256: told.info("file_hash", sha256=sha256),
        lambda failure: told.warning("file_hash_failed", error=str(failure)),
    )
