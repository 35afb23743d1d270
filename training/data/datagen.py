"""Synthetic rows in Criteo's format, with the best possible AUC beside them.

Rows are made in chunks of `CHUNK_ROWS`, each from a random generator of its own, so the same seed
gives the same bytes whatever the number of workers, and memory (about 100 MiB per worker) does not
grow with the rows.  A ``.gz`` file is one compressed member per chunk.

Beside ``FILE`` lies ``FILE.truth.json``: the generating model's parameters, and what the model that knows
them scores on these very rows.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.partitions import EachTask, LocalEngine
from tessera.training.data.criteo_write import format_rows
from tessera.training.data.generating_model import GeneratingModel

CHUNK_ROWS = 1 << 15
AUC_BINS = 1 << 20


@dataclass(frozen=True)
class Truth:
    """What is known about a generated file.

    Attributes:
        rows: number of rows.
        positive_rate: share of rows with label 1; NaN without rows.
        auc: of the generating probabilities on these rows; the expected value of no other
            score is higher.  NaN unless both labels occur.  Probabilities that agree in 20
            bits count as tied.
        log_loss: mean of the generating probabilities on these rows, in nats; NaN without rows.
    """

    rows: int
    positive_rate: float
    auc: float
    log_loss: float


def truth_path(out: Path) -> Path:
    """Where the truth of the file ``out`` is written."""
    return out.with_name(f"{out.name}.truth.json")


def probabilities_path(out: Path) -> Path:
    """Where the generating probabilities of the file ``out`` are written."""
    return out.with_name(f"{out.name}.p.npy")


def generate(
    out: Path,
    *,
    rows: int,
    seed: int,
    positive_rate: float = 0.25,
    workers: int = 1,
    probabilities: bool = False,
    progress: bool = True,
) -> Truth:
    """Write ``out`` and its truth; files of these names are replaced, each as a whole.

    Args:
        out: the file; a name ending in ``.gz`` is compressed.
        rows: how many.
        seed: of the generating model and of the rows.
        positive_rate: share of labels that are 1.
        workers: processes; below 2 none but this one.
        probabilities: also write each row's probability, ``[rows]`` float32, see
            `probabilities_path`.
        progress: show a bar on a terminal.

    Raises:
        UserError: a number is out of its range, ``out``'s folder is not there, ``out`` is something
            else than a file, or the disk is full.
    """
    for name, value in (("rows", rows), ("seed", seed), ("workers", workers)):
        if value < 0:
            raise UserError(f"{name}={value}: give 0 or more")
    if not 0 < positive_rate < 1:
        raise UserError(f"positive_rate={positive_rate}: give a share between 0 and 1")
    if out.exists() and not out.is_file():
        raise UserError(f"out='{out}': exists and is not a file; name another")
    if not out.parent.is_dir():
        raise UserError(f"out='{out}': the folder {out.parent} is not there; make it first")
    tasks = (
        _Chunk(seed, positive_rate, number, min(CHUNK_ROWS, rows - start), out.suffix == ".gz")
        for number, start in enumerate(range(0, rows, CHUNK_ROWS))
    )
    score = _Score()
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(_written(out))
        beside = stack.enter_context(_written(probabilities_path(out))) if probabilities else None
        if beside is not None:
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows,)}
            np.lib.format.write_array_header_1_0(beside, header)
        bar = stack.enter_context(
            tqdm(total=rows, unit="row", unit_scale=True, disable=None if progress else True)
        )
        engine = LocalEngine(processes=workers)
        for task, (lines, probability, labels) in engine.map(EachTask(_make), tasks):
            text.write(lines)
            score.add(probability, labels)
            if beside is not None:
                beside.write(probability.astype("<f4").tobytes())
            bar.update(task.rows)
        truth = score.truth()
        content: dict[str, Any] = {"format": "tessera datagen truth", "version": 1}
        for name, value in vars(truth).items():
            content[name] = None if math.isnan(value) else value
        content["model"] = _model(seed, positive_rate).to_json()
        facts = stack.enter_context(_written(truth_path(out)))
        facts.write(json.dumps(content, indent=1).encode())
    return truth


@contextlib.contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """`replacing`, which tells the user of a full disk."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"out='{path}': cannot be written ({error.strerror}); free some space, or name"
            " another file"
        ) from error


@dataclass(frozen=True)
class _Chunk:
    seed: int
    positive_rate: float
    number: int
    rows: int
    compress: bool


_Made = tuple[bytes, npt.NDArray[np.float64], npt.NDArray[np.bool_]]


@functools.lru_cache(maxsize=1)
def _model(seed: int, positive_rate: float) -> GeneratingModel:
    return GeneratingModel(seed, positive_rate)


def _make(chunk: _Chunk) -> _Made:
    """A chunk's lines (compressed where asked), probabilities and labels; runs in a worker."""
    model = _model(chunk.seed, chunk.positive_rate)
    key = np.random.SeedSequence(chunk.seed, spawn_key=(1, chunk.number))
    random = np.random.default_rng(key)
    rows = model.draw(random, chunk.rows)
    probability = model.probability(rows)
    labels = random.random(chunk.rows) < probability
    lines = format_rows(
        labels=labels,
        integers=rows.integers,
        integer_present=rows.integer_present,
        categories=model.ids(rows.ranks),
        category_present=rows.rank_present,
    )
    # mtime=0: the time of day is not to be in the bytes.
    return (
        gzip.compress(lines, compresslevel=5, mtime=0) if chunk.compress else lines,
        probability,
        labels,
    )


class _Score:
    """AUC and log loss of probabilities, in memory that does not grow with them."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, AUC_BINS), np.int64)  # by label and probability
        self._loss = 0.0

    def add(self, probability: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> None:
        bins = np.minimum((probability * AUC_BINS).astype(np.int64), AUC_BINS - 1)
        for label in (0, 1):
            self._counts[label] += np.bincount(bins[labels == label], minlength=AUC_BINS)
        self._loss -= float(np.log(np.where(labels, probability, 1 - probability)).sum())

    def truth(self) -> Truth:
        negatives, positives = self._counts
        num_negative, num_positive = int(negatives.sum()), int(positives.sum())
        rows = num_negative + num_positive
        # A positive outranks the negatives in lower bins, and half of those in its own.
        below = np.cumsum(negatives) - negatives + negatives / 2
        pairs = num_negative * num_positive
        return Truth(
            rows=rows,
            positive_rate=num_positive / rows if rows else math.nan,
            auc=float((positives * below).sum()) / pairs if pairs else math.nan,
            log_loss=self._loss / rows if rows else math.nan,
        )
