"""What a run folder says of its run, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.trainer.logs import read_metrics, training_time
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.typed_config import leaves


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A number over a training: where it was taken, in samples, and what it was."""

    samples: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run as it is compared with others.

    Attributes:
        name: how the command line named it.
        status: ``finished``, or ``unfinished``.
        config: the resolved config by dotted key, as YAML; without the section ``run``.
        metrics: by ``valid.NAME`` and ``test.NAME``, of the best checkpoint; of an unfinished run
            those of its latest evaluation.
        best_step: the step of the best checkpoint; None: not known.
        parameters: of the model; None: the run was made before they were counted.
        seconds: of training steps, without evaluations and checkpoints.
        samples_per_second: over these; None: there was no step.
        data: by split, the hash of its labels; empty: the run was made before there was one, or is
            unfinished.
        curves: of all labels together: ``train.loss``, ``valid.loss``, ``valid.auc``.
    """

    name: str
    status: str
    config: dict[str, str]
    metrics: dict[str, float | int]
    best_step: int | None
    parameters: int | None
    seconds: float
    samples_per_second: float | None
    data: dict[str, str]
    curves: dict[str, Curve]


def read_run(path: Path) -> RunSummary:
    """What the run folder ``path`` holds.

    Raises:
        UserError: there is no run in it, or a file of it is damaged.
    """
    folder = RunFolder(path)
    if not folder.is_run:
        raise UserError(
            f"{path}: there is no run in it (config.yaml is missing); name a run folder"
        )
    config = leaves(load_config(folder.config).to_plain())
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    final: dict[str, Any] = folder.read_final() if folder.is_finished else {}
    curves = _curves(rows)
    metrics = {
        f"{split}.{name}": value
        for split in ("valid", "test")
        for name, value in (final.get(split) or {}).items()
        if value is not None
    }
    if not final:
        metrics = {name: own.values[-1] for name, own in curves.items() if name[:5] == "valid"}
    seconds, samples = training_time(rows)
    return RunSummary(
        name=str(path),
        status="finished" if final else "unfinished",
        config={key: text for key, text in config.items() if not key.startswith("run.")},
        metrics=metrics,
        best_step=final.get("best_step"),
        parameters=final.get("parameters"),
        seconds=seconds,
        samples_per_second=samples / seconds if seconds else None,
        data={name: text for name, text in (final.get("data") or {}).items() if text},
        curves=curves,
    )


def _curves(rows: Sequence[dict[str, str]]) -> dict[str, Curve]:
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["label"]:
            continue
        for name in ("loss", "auc"):
            if row[name]:
                point = int(row["samples"]), float(row[name])
                points.setdefault(f"{row['split']}.{name}", []).append(point)
    return {
        name: Curve(samples=tuple(x for x, _ in own), values=tuple(y for _, y in own))
        for name, own in points.items()
    }
