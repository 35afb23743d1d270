"""Architectures on generated rows, whose best possible AUC is known.

    python -m tessera.training.bench.known_truth --out FOLDER [--rows N] [--minutes N]

`tessera datagen` draws labels from a model of its own (`tessera.training.data.generating_model`), so that no
model can have a higher AUC on the test rows than that one's probabilities.  Printed is each architecture's
AUC and the share of the way from .5 to the best one.  Settings are those of ``configs/generated.yaml``, which
were chosen for ``dlrm`` on the validation rows; nothing was searched for the others, but for the rate of
``deepfm``'s tables (`TABLE_RATES`).  ``din`` and ``sasrec``
need histories, which these rows do not have.

Runs are kept in ``--out``.  It writes ``known_truth.md`` there and prints it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tessera.training.bench.harness import arguments, machine
from tessera.training.bench.trials import Scored, Trials, first_labels, train_and_score
from tessera.training.config import SHIPPED_CONFIGS, ExperimentConfig
from tessera.training.data.datagen import generate, probabilities_path
from tessera.training.data.dataset import DatasetView
from tessera.training.data.opening import open_data

SEED = 0
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dlrm_dcn": {"dcn_num_layers": 2, "dcn_low_rank_dim": 16},
    "deepfm": {},
    "mmoe": {"expert_layers": [64], "tower_layers": [32]},
    "ple": {"levels": 1, "expert_layers": [64], "tower_layers": [32]},
}
TABLE_RATES = {"deepfm": 3.0}
"""Learning rates of tables that are not those of the config.

The slope of a sum over all pairs of vectors is, for each vector, the sum of all others, so that a rate which
suits products behind a layer makes them grow: ``deepfm`` diverges within 13 steps at the config's.
"""
EXPERTS = ("mmoe", "ple")
"""The architectures without a bottom and a top MLP."""


def sections(arch: str, file: Path) -> dict[str, Any]:
    """The sections of a config."""
    shipped = yaml.safe_load((SHIPPED_CONFIGS / "generated.yaml").read_text(encoding="utf-8"))
    model = {**shipped["model"], **ARCHITECTURES[arch], "arch": arch}
    if arch in EXPERTS:
        del model["dense_layers"], model["over_layers"]
    tables = {**shipped["train"]["embedding_optimizer"]}
    tables["learning_rate"] = TABLE_RATES.get(arch, tables["learning_rate"])
    return {
        "data": {**shipped["data"], "path": str(file)},
        "model": model,
        "train": {
            **shipped["train"],
            "embedding_optimizer": tables,
            "eval_every_epochs": shipped["train"]["epochs"],
        },
        "run": {"report": False, "tensorboard": False},
    }


def measure(trials: Trials, rows: int, work: Path) -> dict[str, float]:
    """AUC on the test rows by model, the truth first."""
    file = work / "generated.tsv"
    generate(file, rows=rows, seed=SEED, probabilities=True, progress=False)
    test = open_data(
        ExperimentConfig.from_plain(sections("dlrm", file), name="truth").data, progress=False
    ).test
    assert isinstance(test, DatasetView), "data that can be read by number"
    truth = np.load(probabilities_path(file))[test.slice(0, len(test))].astype(np.float64)
    found = {
        "the generating model": Scored({"test": truth}, {"test": first_labels(test)}).auc("test")
    }
    for arch in ARCHITECTURES:
        plain = sections(arch, file)

        def run(plain: dict[str, Any] = plain, arch: str = arch) -> Scored:
            config = ExperimentConfig.from_plain(plain, name=arch)
            valid = open_data(config.data, progress=False).valid
            return train_and_score(config, {"valid": valid, "test": test}, work / "run")

        what = {
            "arch": arch,
            "rows": rows,
            "config": {k: v for k, v in plain.items() if k != "data"},
        }
        if (scored := trials.scored(what, run)) is not None:
            found[f"`{arch}`"] = scored.auc("test")
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results")
    parser.add_argument("--rows", type=int, default=1_000_000, help="default: a million")
    parser.add_argument(
        "--minutes", type=float, help="begin no run after so many; default: no limit"
    )
    args = parser.parse_args()
    trials = Trials(args.out, minutes=args.minutes)
    with tempfile.TemporaryDirectory() as work:
        found = measure(trials, args.rows, Path(work))
    best = next(iter(found.values()))
    lines = [
        f"{machine()}. {args.rows} rows.",
        "",
        "| model | AUC | of the best |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {auc:.4f} | {(auc - 0.5) / (best - 0.5):.1%} |" for name, auc in found.items()
    ]
    text = "\n".join(lines) + "\n"
    (args.out / "known_truth.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
