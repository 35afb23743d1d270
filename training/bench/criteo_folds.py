"""Architectures with target statistics on 14,584 rows of Criteo, beside tuned peers, by 5-fold cross-validation.

    python -m tessera.training.bench.criteo_folds --data FOLDER/criteo_sample_14584.tsv --out FOLDER [--minutes N]

Stratified folds, `FOLD_SEED`, as in `tessera.training.bench.quality`.  A fold's test rows choose nothing.  For
the peers' ``C``, leaves and rounds, and for what `ARCHITECTURES` lists of an architecture, every eighth of its
training rows is held back, the others are trained on, and the best setting is then trained on all of them; every
fold chooses for itself.  ``dlrm`` and ``dlrm_dcn`` have one setting, whose rate and L2 are those that let a
first-order term come as far as the regression's ``C`` does.  The rest is ``configs/criteo_sample.yaml``.

The target statistics (the mean and count of the label for each id of each category) are out-of-fold
ones of the training rows; see `tessera.training.transforms.target_statistics`.

± is the standard error over folds; the differences to the peers are those of pairs.  Runs are kept in
``--out``: the script goes on where it was stopped.  It writes ``criteo_folds.md`` there and prints it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from sklearn.model_selection import StratifiedKFold

from tessera.training.bench import peers
from tessera.training.bench.harness import arguments, machine
from tessera.training.bench.trials import Scored, Trials, train_and_score
from tessera.training.config import SHIPPED_CONFIGS, ExperimentConfig
from tessera.training.data.criteo_format import DENSE_NAMES, SPARSE_NAMES
from tessera.training.data.opening import open_data

FOLDS, FOLD_SEED, HELD_BACK = 5, 0, 8
Rows = npt.NDArray[np.int64]

_L2 = {"name": "sgd", "learning_rate": 4.0, "weight_decay": 0.003}
_FIRST_ORDER = {"first_order": True}


def _deepfm(learning_rate: float, weight_decay: float) -> Setting:
    """SGD of the tables' own; the first-order weights' optimizer is that of all others."""
    tables = {"name": "sgd", "learning_rate": learning_rate, "weight_decay": weight_decay}
    train = {"embedding_optimizer": tables, "first_order_optimizer": _L2}
    return {"embedding_dropout": 0.5}, train


Setting = tuple[dict[str, Any], dict[str, Any]]
ARCHITECTURES: dict[str, dict[str, Setting]] = {
    "dlrm": {"": (_FIRST_ORDER, {"embedding_optimizer": _L2})},
    "dlrm_dcn": {
        "": (
            {**_FIRST_ORDER, "dcn_num_layers": 1, "dcn_low_rank_dim": 8},
            {"embedding_optimizer": _L2},
        )
    },
    "deepfm": {
        "tables at .5, embedding dropout": _deepfm(0.5, 0.03),
        "tables at .1, embedding dropout": _deepfm(0.1, 0.1),
    },
}
"""By architecture the settings to choose from: what differs in ``model`` and in ``train``.

A step of SGD on a row whose id stands in a share ``s`` of the batch's samples is stable while ``rate * s * p (1 - p)
|S| ** 2 < 2``, ``S`` being the sum of the vectors beside it in ``deepfm``'s factorization machine and ``p`` the
probability.  With 26 vectors that ends long before the rate at which first-order weights come as far as the
regression's, so that the two have optimizers of their own.
"""
SETTINGS = {"first order, L2": False, "first order, L2, target statistics": True}
"""Whether there are target statistics."""

PEERS = ("LightGBM", "logistic regression")
INVERSE_L2 = (0.03, 0.1)
LEAVES = (4, 7)
ROUNDS = (150,)


class Sample:
    """The sample as a table, and its folds.

    Args:
        file: tab-separated, in Criteo's own format.
    """

    def __init__(self, file: Path) -> None:
        lines = [line.split("\t") for line in file.read_text(encoding="ascii").splitlines()]
        columns = [list(column) for column in zip(*lines, strict=True)]
        self.labels = np.array(columns[0], np.float64)
        dense = [[float(x) if x else None for x in column] for column in columns[1:14]]
        ids = [[int(x, 16) if x else None for x in column] for column in columns[14:]]
        arrays = [pa.array(column, pa.float32()) for column in dense]
        arrays += [pa.array(column, pa.int64()) for column in ids]
        self.table = pa.table(
            [pa.array(self.labels), *arrays], names=["label", *DENSE_NAMES, *SPARSE_NAMES]
        )
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=FOLD_SEED)
        self.folds: list[tuple[Rows, Rows]] = list(folds.split(self.labels, self.labels))


class Bench:
    """The runs, and the files that they read.

    Args:
        sample: the rows.
        trials: the runs.
        work: a folder for what is not kept.
    """

    def __init__(self, sample: Sample, trials: Trials, work: Path) -> None:
        self._sample, self._trials, self._work = sample, trials, work

    def parts(self, fold: int, *, inner: bool) -> dict[str, Path]:
        """The files of the rows to train on and of those to score: by purpose."""
        known, test = self._sample.folds[fold]
        back = np.arange(len(known)) % HELD_BACK == 0
        rows = (
            {"train": known[~back], "held": known[back]}
            if inner
            else {"train": known, "held": test}
        )
        files = {}
        for name, own in rows.items():
            files[name] = self._work / f"{fold}-{'inner' if inner else 'whole'}-{name}.parquet"
            if not files[name].exists():
                pq.write_table(self._sample.table.take(own), files[name])
        return files

    def model(self, fold: int, arch: str, setting: str, own: str, *, inner: bool) -> Scored | None:
        """One training, of ``setting`` and the architecture's ``own``; None if the time is up."""
        data, sections = self._sections(setting, *ARCHITECTURES[arch][own], arch=arch)

        def run() -> Scored:
            files = self.parts(fold, inner=inner)
            # The last epoch is taken, so that it does not matter on which rows it is evaluated.
            paths = {"path": str(files["train"]), "valid_path": str(files["held"])}
            plain = {"data": {**data, **paths}, **sections}
            config = ExperimentConfig.from_plain(plain, name=arch)
            held = open_data(config.data, progress=False).valid
            return train_and_score(config, {"valid" if inner else "test": held}, self._work / "run")

        whole = f"{setting}, {own}" if own else setting
        what = {"fold": fold, "inner": inner, "arch": arch, "setting": whole}
        return self._trials.scored({**what, "config": {**sections, "data": data}}, run)

    def _sections(
        self, setting: str, model: dict[str, Any], train: dict[str, Any], **arch: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The sections of a config: ``data``, without paths, and the others."""
        file = SHIPPED_CONFIGS / "criteo_sample.yaml"
        shipped = yaml.safe_load(file.read_text(encoding="utf-8"))
        kept = {k: v for k, v in shipped["model"].items() if not k.startswith("dcn_")}
        last = {"eval_every_epochs": shipped["train"]["epochs"]}
        columns: dict[str, Any] = {"label": {"kind": "label"}}
        columns |= {name: {"kind": "dense", "transform": ["log1p"]} for name in DENSE_NAMES}
        columns |= {name: {"kind": "categorical"} for name in SPARSE_NAMES}
        data: dict[str, Any] = {"format": "table", "split": "files", "columns": columns}
        if SETTINGS[setting]:
            data["target_statistics"] = {f"{name}_rate": {"key": [name]} for name in SPARSE_NAMES}
        return data, {
            "model": {**kept, **model, **arch},
            "train": {**shipped["train"], **last, **train},
            "run": {"report": False, "tensorboard": False},
        }

    def peer(self, fold: int, setting: str, peer: Peer, *, inner: bool) -> Scored | None:
        """One fit of a peer."""

        def fit() -> Scored:
            files = self.parts(fold, inner=inner)
            data, _ = self._sections("first order, L2", {}, {})
            paths = {"path": str(files["train"]), "valid_path": str(files["held"])}
            sections = {"data": {**data, **paths}, "model": {}}
            splits = open_data(
                ExperimentConfig.from_plain(sections, name="peers").data, progress=False
            )
            known, held = peers.plain(splits.train), peers.plain(splits.valid)
            name = "valid" if inner else "test"
            return Scored({name: peer(known, held)}, {name: held.labels.astype(np.float64)})

        return self._trials.scored({"fold": fold, "inner": inner, "peer": setting}, fit)


Peer = Callable[[peers.Plain, peers.Plain], peers.Scores]
Trial = Callable[..., Scored | None]


def contenders(bench: Bench) -> dict[str, dict[str, Trial]]:
    """By model and setting: what trains and scores it, called with ``fold`` and ``inner``."""
    found: dict[str, dict[str, Trial]] = {}
    found["LightGBM"] = {
        (name := f"{leaves} leaves, {rounds} rounds"): partial(
            bench.peer, setting=name, peer=partial(peers.lightgbm, leaves=leaves, rounds=rounds)
        )
        for leaves, rounds in itertools.product(LEAVES, ROUNDS)
    }
    found["logistic regression"] = {
        (name := f"C={c:g}"): partial(
            bench.peer, setting=name, peer=partial(peers.logistic_regression, inverse_l2=c)
        )
        for c in INVERSE_L2
    }
    for setting, arch in itertools.product(SETTINGS, ARCHITECTURES):
        found[f"`{arch}`, {setting}"] = {
            own: partial(bench.model, arch=arch, setting=setting, own=own)
            for own in ARCHITECTURES[arch]
        }
    return found


def outer(fold: int, trials: Mapping[str, Trial]) -> tuple[str, Scored] | None:
    """The setting that the inner rows choose, and the model that it gives; None if the time is up."""
    chosen = next(iter(trials))
    if len(trials) > 1:
        inner = {name: trial(fold, inner=True) for name, trial in trials.items()}
        known = {name: own.auc("valid") for name, own in inner.items() if own is not None}
        if len(known) < len(trials):
            return None
        chosen = max(known, key=lambda name: known[name])
    scored = trials[chosen](fold, inner=False)
    return None if scored is None else (chosen, scored)


def table(found: Mapping[str, Mapping[int, tuple[str, Scored]]]) -> str:
    """The results; the folds that a peer and a model both have are compared."""
    less_peers = "".join(f" less {peer}'s |" for peer in PEERS)
    lines = [
        f"{machine()}.",
        "",
        f"| model | AUC |{less_peers} folds | chosen by the folds |",
        f"| --- | --- |{' --- |' * len(PEERS)} --- | --- |",
    ]
    aucs = {
        name: {fold: scored.auc("test") for fold, (_, scored) in folds.items()}
        for name, folds in found.items()
    }
    aucs["mean of all models' ranks"] = _of_ranks(found)
    for name, own in aucs.items():
        if not own:
            continue
        less = [_less(own, aucs[peer]) if name != peer else "" for peer in PEERS]
        settings = [setting for setting, _ in found.get(name, {}).values()]
        counts = [f"{s} ({settings.count(s)})" for s in dict.fromkeys(settings)]
        if len(counts) == 1 and counts[0].startswith(" "):
            counts = []  # there was nothing to choose
        cells = [name, _with_error(list(own.values())), *less, str(len(own)), "; ".join(counts)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _less(own: Mapping[int, float], peer: Mapping[int, float]) -> str:
    """The mean difference over the folds that both have, with its error; empty where there are none."""
    pairs = [own[fold] - peer[fold] for fold in own if fold in peer]
    return _with_error(pairs, sign="+") if pairs else ""


def _of_ranks(found: Mapping[str, Mapping[int, tuple[str, Scored]]]) -> dict[int, float]:
    """The AUC, by fold, of the mean of the models' ranks, in the folds that all models have."""
    aucs = {}
    for fold in set.intersection(*(set(folds) for folds in found.values())):
        runs = [folds[fold][1] for folds in found.values()]
        ranks = [np.argsort(np.argsort(run.scores["test"])).astype(np.float64) for run in runs]
        joined = Scored({"test": np.mean(ranks, axis=0)}, runs[0].labels)
        aucs[fold] = joined.auc("test")
    return aucs


def _with_error(values: list[float], sign: str = "") -> str:
    mean = f"{np.mean(values):{sign}.4f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.4f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the sample's file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results")
    parser.add_argument(
        "--minutes", type=float, help="begin no run after so many; default: no limit"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Sample(args.data), Trials(args.out, minutes=args.minutes), Path(work))
        trials = contenders(bench)
        found: dict[str, dict[int, tuple[str, Scored]]] = {name: {} for name in trials}
        for name, own in trials.items():
            for fold in range(FOLDS):
                if (result := outer(fold, own)) is not None:
                    found[name][fold] = result
            (args.out / "criteo_folds.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
