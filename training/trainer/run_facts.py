"""What a report tells of a run besides its figures: where its rows came from, when and on what it ran, what was chosen."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tessera.training.config import ExperimentConfig
from tessera.training.data.dataset import DataSplits
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.typed_config import leaves, to_plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """A key of the config that does not have its default.

    Attributes:
        key: the dotted key.
        value: the value, as YAML on one line.
        default: the default, likewise; None: the key has none and must be given.
    """

    key: str
    value: str
    default: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of one run.

    Attributes:
        name: of the run folder.
        source: the data's format and its paths.
        rows: how many each split has, by its name.
        started: when the run was begun; not when it was last resumed.
        hardware: the processor or GPU, how many, and torch's version.
        changed: the keys without their default, in the config's order.
    """

    name: str
    source: str
    rows: Mapping[str, int]
    started: datetime
    hardware: str
    changed: Sequence[Changed]


def facts_of(
    folder: RunFolder,
    config: ExperimentConfig,
    splits: DataSplits,
    *,
    device: torch.device,
    ranks: int,
) -> RunFacts:
    """The facts of a run that has ended in ``folder``."""
    paths = ", ".join(map(str, config.data.paths()))
    return RunFacts(
        name=folder.root.resolve().name,
        source=f"{config.data.format}: {paths}" if paths else config.data.format,
        rows={name: len(getattr(splits, name)) for name in ("train", "valid", "test")},
        started=folder.started(),
        hardware=hardware_of(device, ranks),
        changed=changed_keys(config),
    )


def changed_keys(config: Any) -> list[Changed]:
    """The keys of a dataclass, and of those within it, whose values are not the defaults.

    A section that is chosen by name, such as an optimizer, is compared with the defaults of what was chosen.
    """
    given, usual = leaves(to_plain(config)), leaves(_defaults_of(config))
    return [
        Changed(key=key, value=value, default=usual.get(key))
        for key, value in given.items()
        if usual.get(key) != value
    ]


def _defaults_of(config: Any) -> dict[str, Any]:
    """The defaults of the fields of ``config``, as `to_plain` gives them; a field without one is left out."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, default = getattr(config, item.name), _default(item)
        if dataclasses.is_dataclass(value) and type(value) is not type(default):
            found[item.name] = _defaults_of(value)
        elif default is not dataclasses.MISSING:
            found[item.name] = to_plain(default)
    return found


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def hardware_of(device: torch.device, ranks: int) -> str:
    """What a run of so many ranks on ``device`` computes with, as far as this rank sees it."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cpus = _number(len(os.sched_getaffinity(0)), "CPU")
        name = f"{_processor()}, {cpus}, {_number(torch.get_num_threads(), 'thread')}"
    shared = f"{ranks} ranks, each on " if ranks > 1 else ""
    return f"{shared}{name}; torch {torch.__version__}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
