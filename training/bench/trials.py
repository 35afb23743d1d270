"""Runs of the benchmarks of quality, kept as they end so that a script that is started again goes on.

A folder holds ``runs.jsonl``, a line for each run with what it is and its seconds, and for each run an
``.npz`` with the labels and scores of the held-out rows.  What a run is called is a hash of
its whole description, so that a changed setting is another run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import roc_auc_score

from tessera.training.config import ExperimentConfig
from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader
from tessera.training.trained import TrainedModel, load_trained
from tessera.training.trainer.loop import DivergedError
from tessera.training.trainer.run import train

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """What a model says of held-out rows: by their name its scores and the labels, each ``[n]``."""

    scores: Mapping[str, Values]
    labels: Mapping[str, Values]

    def auc(self, rows: str) -> float:
        """The AUC on the rows of this name; .5 of scores that are not numbers."""
        if not np.isfinite(self.scores[rows]).all():
            return 0.5
        return float(roc_auc_score(self.labels[rows], self.scores[rows]))


class Trials:
    """The runs in a folder.

    Args:
        folder: where they are kept; it is made if need be.
        minutes: after so many no run is begun any more; None: there is no limit.
    """

    def __init__(self, folder: Path, *, minutes: float | None = None) -> None:
        self._folder = folder
        (folder / "scores").mkdir(parents=True, exist_ok=True)
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() > self._end

    def scored(self, what: Mapping[str, Any], run: Callable[[], Scored]) -> Scored | None:
        """The scores of the run that ``what`` describes, by ``run`` if they are not here yet.

        None if they are not, and the time is up.
        """
        text = json.dumps(what, sort_keys=True)
        file = self._folder / "scores" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
        if not file.exists():
            if self.over:
                return None
            begin, cpu = time.perf_counter(), time.process_time()
            found = run()
            seconds = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
            whole = file.with_suffix(".tmp.npz")
            scores = {f"scores {name}": values for name, values in found.scores.items()}
            labels = {f"labels {name}": values for name, values in found.labels.items()}
            arrays: dict[str, Any] = {**scores, **labels}
            np.savez(whole, **arrays)
            whole.rename(file)
            line = {**what, **{name: round(value, 2) for name, value in seconds.items()}}
            with (self._folder / "runs.jsonl").open("a") as runs:
                runs.write(json.dumps(line) + "\n")
            shown = ", ".join(str(value) for key, value in what.items() if key != "config")
            aucs = [f"{name} {found.auc(name):.4f}" for name in found.labels if "test" not in name]
            print(f"{shown}: {', '.join(aucs)} ({seconds['seconds']:.0f} s)", flush=True)
        with np.load(file) as arrays:
            return Scored(
                *(
                    {
                        name.removeprefix(kind): arrays[name]
                        for name in arrays
                        if name.startswith(kind)
                    }
                    for kind in ("scores ", "labels ")
                )
            )


def train_and_score(config: ExperimentConfig, rows: Mapping[str, View], folder: Path) -> Scored:
    """Train in ``folder``, which is removed, and score ``rows`` by the logits of the first label.

    Scores are NaN if the loss diverges.
    """
    trained = trained_on(config, folder)
    scored = Scored(
        {name: logits(trained, view) for name, view in rows.items()},
        {name: first_labels(view) for name, view in rows.items()},
    )
    shutil.rmtree(folder, ignore_errors=True)
    return scored


def trained_on(config: ExperimentConfig, folder: Path) -> TrainedModel | None:
    """Train in ``folder``, whatever is there before; None if the loss diverges."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        train(config, folder, progress=False)
    except DivergedError as error:
        print(error, flush=True)
        return None
    return load_trained(folder)


def logits(trained: TrainedModel | None, view: View) -> Values:
    """``[len(view)]`` logits of the first label; NaN of a model that there is not."""
    if trained is None:
        return np.full(len(view), np.nan)
    parts = [np.empty(0)]
    with torch.no_grad():
        for batch in BatchLoader(view, batch_size=8192, shuffle=False, seed=0).epoch(0):
            out = trained.model(batch.dense_features, batch.sparse_features)
            parts.append(out.reshape(len(batch.labels), -1)[:, 0].double().numpy())
    return np.concatenate(parts)


def first_labels(view: View) -> Values:
    """``[len(view)]`` of the first label."""
    return view.labels().reshape(len(view), -1)[:, 0].astype(np.float64)
